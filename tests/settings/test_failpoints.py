"""Failpoints: how they are written, what they do, and that each stands somewhere."""

import ast
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from forgekeeper import boot
from forgekeeper.batches import BATCHES
from forgekeeper.boot import load
from forgekeeper.failpoints import STEPS, FailpointReached, Fault, arm, failpoint
from forgekeeper.failpoints import parse as parse_at
from forgekeeper.settings import PREFIX, SettingsError

ROOT = Path(__file__).parents[2]
NAME, OTHER = "user_status_cleanup.deleted", "prune.removed"


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm(parse(""))


NAMES = boot.model().steps


def parse(text):
    return parse_at(text, NAMES)


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
arm(parse("{NAME}=kill", ["{NAME}"]))
failpoint("{OTHER}")
print("alive", flush=True)
failpoint("{NAME}")
print("not reached", flush=True)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert killed.returncode == -signal.SIGKILL
    assert "alive" in killed.stdout
    assert "not reached" not in killed.stdout


OF_LOOPS = {"deleted", "enqueued", "removed"}
"""The steps of the engine's loops that no document names."""


def points(path):
    """Name the engine's failpoints in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "failpoint":
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


def steps_named(path):
    """Name the steps that a document takes, or has its items, rows and changes take."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("step", "failpoint"):
                yield from (one.value.rpartition(".")[2] for one in node.args if isinstance(one, ast.Constant))
            yield from (one.value.value for one in node.keywords if one.arg == "step")
        elif isinstance(node, ast.Assign) and any(getattr(one, "id", None) == "steps" for one in node.targets):
            yield from (one.value for one in node.value.elts if one.value)


def test_each_failpoint_of_the_engine_stands_in_one_place():
    files = [ROOT / "scheduler.py", *(ROOT / "forgekeeper").rglob("*.py")]

    assert Counter(point for path in files for point in points(path)) == dict.fromkeys(STEPS, 1)


@pytest.mark.parametrize("batch", BATCHES)
def test_each_failpoint_of_a_batch_is_named_where_it_stands(batch):
    file = Path(sys.modules[BATCHES[batch].module].__file__)
    files = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]

    declared = {step.partition(".")[2] for one in all_of(batch) for step in one.steps}

    assert {step for path in files for step in steps_named(path)} | OF_LOOPS == declared | OF_LOOPS


def all_of(batch):
    return (BATCHES[batch], *BATCHES[batch].children)
