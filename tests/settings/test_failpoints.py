"""Failpoints: how they are written, and what they do."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forgekeeper.boot import load
from forgekeeper.failpoints import FailpointReached, Fault, arm, failpoint, parse
from forgekeeper.settings import PREFIX, SettingsError

ROOT = Path(__file__).parents[2]
NAME, OTHER = "user_status_cleanup.deleted", "prune.deleted"


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


def test_a_failpoint_can_kill_its_process():
    program = f"""
from forgekeeper.failpoints import parse
from forgekeeper.failpoints import arm
from forgekeeper.failpoints import failpoint
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
