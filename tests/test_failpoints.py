"""Failpoints: how they are written, what they do, and that each stands somewhere."""

import ast
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from forgekeeper import failpoints
from forgekeeper.boot import load
from forgekeeper.failpoints import FailpointReached, arm, failpoint
from forgekeeper.settings import PREFIX, SettingsError
from forgekeeper.settings.failpoints import NAMES, Fault, parse

ROOT = Path(__file__).parents[1]
NAME, OTHER = "user_status_cleanup.deleted", "prune.removed"


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm(parse(""))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", {}),
        (f"{NAME}=kill", {NAME: Fault("kill")}),
        (f"{NAME}=raise*2", {NAME: Fault("raise", times=2)}),
        (f" {NAME}=sleep:0.5 , {OTHER}=sleep:3*1", {NAME: Fault("sleep", 0.5), OTHER: Fault("sleep", 3.0, 1)}),
    ],
)
def test_failpoints_are_written_by_name_and_fault(text, faults):
    assert parse(text) == faults


@pytest.mark.parametrize(
    "text", [NAME, f"{NAME}=", f"{NAME}=die", f"{NAME}=sleep", f"{NAME}=sleep:x", f"{NAME}=kill*", f"{NAME}=kill*-1"]
)
def test_what_is_no_fault_stops_the_start_and_is_named(monkeypatch, text):
    monkeypatch.setenv(PREFIX + "FAILPOINTS", text)

    with pytest.raises(SettingsError, match=r"bad value of FORGEKEEPER_FAILPOINTS: .* is not name=kill"):
        load()


def test_an_unknown_failpoint_stops_the_start_and_the_nearest_is_named(monkeypatch):
    monkeypatch.setenv(PREFIX + "FAILPOINTS", "user_status_cleanup.deletd=kill")

    with pytest.raises(SettingsError, match=r"no failpoint .*did you mean user_status_cleanup\.deleted"):
        load()


def test_without_the_setting_none_is_armed(settings):
    arm(settings.failpoints)

    for name in NAMES:
        failpoint(name)
    assert failpoints._armed == {}


def test_an_armed_failpoint_raises_and_others_do_not():
    arm(parse(f"{NAME}=raise"))

    failpoint(OTHER)
    for _ in range(2):
        with pytest.raises(FailpointReached):
            failpoint(NAME)


def test_a_fault_happens_as_often_as_it_was_asked_for():
    arm(parse(f"{NAME}=raise*1"))

    with pytest.raises(FailpointReached):
        failpoint(NAME)
    failpoint(NAME)


def test_arming_anew_begins_anew():
    for _ in range(2):
        arm(parse(f"{NAME}=raise*1"))

        with pytest.raises(FailpointReached):
            failpoint(NAME)


def test_a_failpoint_can_wait():
    arm(parse(f"{NAME}=sleep:0.2"))
    began = time.monotonic()

    failpoint(NAME)

    assert time.monotonic() - began >= 0.2


def test_a_failpoint_can_kill_its_process():
    program = f"""
from settings.failpoints import parse
from workers.failpoints import arm, failpoint
arm(parse("{NAME}=kill"))
failpoint("{OTHER}")
print("alive", flush=True)
failpoint("{NAME}")
print("not reached", flush=True)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert killed.returncode == -signal.SIGKILL
    assert "alive" in killed.stdout
    assert "not reached" not in killed.stdout


def test_each_failpoint_stands_in_one_place():
    calls = [
        node.args[0].value
        for path in (ROOT / "scheduler.py", *(ROOT / "workers").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint"
    ]

    assert Counter(calls) == dict.fromkeys(NAMES, 1)
