"""The checker finds a violation of each property, and none where there is none: or else a soak proves nothing."""

import json
from collections import Counter
from datetime import UTC, datetime

import pytest

from .evidence import Evidence
from .history import Final, Operation
from .models import DAY, UPLOAD
from .properties import PROPERTIES, check

NOW = 1_000_000.0
LATER = NOW + 100
HOUR = 3600
SECRET = "swordfish"
KINDS = ("holders", "starts", "transaction", "half entity", "missing", "threads", "counter", "page", "late", "outlived")


def done(subject, do, outcome="ok", *, at=NOW, value=None, **args):
    return Operation(subject, do, args, at, at + 1, outcome, value)


def run(number, tick, **changes):
    row = {"id": number, "batch": "prune", "state": "succeeded", "reason": None, "attempt": 1, "failures": 0}
    times = {"tick": tick, "claimed_at": tick, "started_at": tick + 1, "finished_at": tick + 2}
    return {**row, "losses": 0, **times, **changes}


@pytest.fixture
def evidence(tmp_path):
    """Something of each kind, and a forgekeeper that has done what it should."""
    operations = [
        done("status:1", "set", clear=NOW + 5),
        done("status:1", "extend", at=NOW + 3, clear=NOW + HOUR),
        done("status:2", "set", clear=NOW + 5),
        done("import:1", "create", status=1, touched=NOW - DAY - 5),
        done("import:1", "resume", at=NOW + 1, touched=NOW),
        done("import:2", "create", status=0, touched=NOW - 60),
        done("import:2", "finish", at=NOW + 1),
        done("artifact:1", "create", path="d/1", expires=NOW + 5, locked=0, type=1),
        done("artifact:1", "lock", at=NOW + 2, locked=1),
        done("artifact:2", "create", path="d/2", expires=NOW + 5, locked=0, type=1),
        done("upload:artifacts:a", "prepare"),
        done("ref:1:refs/a", "push", oid="1"),
        done("ref:1:refs/a", "list", at=NOW + 1, id=1, expected="1"),
        done("ref:1:refs/a", "push", at=NOW + 3, oid="2"),
        done("ref:1:refs/b", "push", oid="1"),
        done("ref:1:refs/b", "list", at=NOW + 1, id=2, expected=None),
        done("ref:1:refs/b", "close", at=NOW + 5, id=2),
        done("ref:1:refs/b", "push", at=NOW + 7, oid="1"),
    ]
    by_subject = {}
    for operation in operations:
        by_subject.setdefault(operation.subject, []).append(operation)
    final = Final(
        now=LATER,
        statuses={"1": NOW + HOUR},
        imports={"import:1": [1, NOW], "import:2": [2, NOW - 60]},
        artifacts={"1": [NOW + 5, 1, 1, "d/1"]},
        register={"pending": {"artifacts:a": NOW}, "deleting": {}, "failed": {}},
        requests={"1": ["ref:1:refs/a", "1", 3, "moved"], "2": ["ref:1:refs/b", None, 2, None]},
        refs={"ref:1:refs/a": "2", "ref:1:refs/b": "1"},
        files=["a", "d/1"],
        files_then=["a", "d/1"],
        named_then=["a", "d/1"],
        runs=[run(number, NOW + 2 * number - 2) for number in range(1, 52)],
        effects={"user_status": 3},
        counted={"user_status": 3},
        buckets={"available": [0, 1], "occupied": [], "max": 2},
    )
    log = tmp_path / "worker-1.log"
    at = datetime.fromtimestamp(NOW + 2, UTC).isoformat()
    line = {"message": "run finished", "batch": "prune", "run": 1, "message_id": "1", "seconds": 1.0, "at": at}
    log.write_text(json.dumps(line) + "\n")
    holders = [{"db": NOW + n, "holders": {"bucket 0": token}, "available": ["1"]} for n, token in enumerate("ab")]
    return Evidence(
        by_subject,
        {"holders": holders},
        Counter(KINDS),
        final,
        logs=[log],
        secrets=(SECRET,),
        periods={"prune": 2},
        longest={"prune": 30.0},
        recoveries=[3.0],
    )


def broken(evidence):
    return [name for name, sentences in check(evidence).items() if sentences]


def test_a_history_that_is_possible_breaks_nothing(evidence):
    assert broken(evidence) == []


def seen(kind, **facts):
    return lambda evidence: evidence.samples.__setitem__(kind, [facts])


def logged(text):
    return lambda evidence: evidence.logs[0].write_text(text)


def without_artifact(evidence):
    del evidence.final.artifacts["1"]
    evidence.final.files.remove("d/1")


def never_made(evidence):
    evidence.operations["import:3"] = [done("import:3", "create", "failed", status=1, touched=NOW)]
    evidence.final.imports["import:3"] = [1, NOW]


PLANTED = [
    ("P0", seen("refused", sentence="forgekeeper-worker was refused keys")),
    ("P1", lambda evidence: evidence.final.statuses.update({"2": NOW + 5})),
    ("P1", lambda evidence: evidence.final.register["pending"].update({"artifacts:z": NOW - UPLOAD - 50})),
    ("P1", lambda evidence: evidence.final.stranded.append("git clean_project_refs:1")),
    ("P2", lambda evidence: evidence.final.statuses.pop("1")),
    ("P2", lambda evidence: evidence.final.imports.update({"import:1": [3, LATER]})),
    ("P2", without_artifact),
    ("P2", lambda evidence: evidence.final.register["pending"].clear() or evidence.final.files.remove("a")),
    ("P2", lambda evidence: evidence.final.refs.pop("ref:1:refs/a")),
    ("P2", lambda evidence: evidence.final.refs.pop("ref:1:refs/b")),
    ("P3", lambda evidence: evidence.final.files.remove("d/1")),
    ("P4", lambda evidence: evidence.final.files_then.append("orphan")),
    ("P5", lambda evidence: evidence.samples["holders"].append({"db": NOW + 9, "holders": {"bucket 0": "a"}})),
    ("P6", lambda evidence: evidence.final.buckets["available"].remove(1)),
    ("P7", lambda evidence: evidence.final.runs.pop(1)),
    ("P7", lambda evidence: evidence.final.runs[1].update(state="enqueued")),
    ("P8", lambda evidence: evidence.final.wrong_statistics.append(1)),
    ("P8", never_made),
    ("P9", lambda evidence: evidence.final.runs[0].update(finished_at=NOW + HOUR)),
    ("P10", seen("transaction", application="a worker", state="active", seconds=11.0, db=NOW + 20)),
    ("P11", lambda evidence: evidence.final.imports.update({"import:2": [3, LATER]})),
    ("P12", lambda evidence: evidence.final.counted.update({"user_status": 4})),
    ("P13", seen("threads", service="cron", threads=3)),
    ("P14", seen("starts", message="clean_project_refs:1", count=5)),
    ("P15", logged(f"redis://:{SECRET}@host\n")),
    ("P16", seen("late", batch="git_ref_cleanup", due=136, count=136, left=[1, 2], seconds=61.0)),
    ("P17", seen("outlived", service="cron", who=["-m cli worker"], seconds=31.0)),
]


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_a_violation_is_found_and_the_right_property_blamed(evidence, name, plant):
    plant(evidence)

    assert broken(evidence) == [name]


def test_each_property_has_a_violation_that_is_found():
    assert {name for name, _ in PLANTED} == PROPERTIES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_property_that_nobody_looked_at_does_not_hold(evidence, kind):
    evidence.looked[kind] = 0

    assert broken(evidence) != []


def went_back(evidence, *, kept, returned):
    """Let PostgreSQL go back, at one moment, to what it knew at another."""
    evidence.operations["postgres"] = [
        Operation("postgres", do, {}, at, at + 0.5, "ok") for do, at in (("keep", kept), ("return", returned))
    ]


@pytest.mark.parametrize(("kept", "expected"), [(NOW + 1.5, {}), (NOW + 6.5, {"P2": 2})])
def test_what_was_done_between_the_copy_of_a_server_and_its_return_is_undone_and_nothing_else(evidence, kept, expected):
    went_back(evidence, kept=kept, returned=NOW + 10)
    # That was extended, and that was pushed again once its deletion was closed.
    del evidence.final.statuses["1"], evidence.final.refs["ref:1:refs/b"]

    assert {name: len(found) for name, found in check(evidence).items() if found} == expected
