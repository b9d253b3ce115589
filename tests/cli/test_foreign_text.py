"""Whatever other programs have written: no command hands it to a terminal, stumbles over it, or is long about it."""

import json
from datetime import timedelta

import pytest

from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import MAX_OBJECT_ATTEMPTS, DeletedObject
from metrics.logs import CONTROL_ESCAPES
from models import GitRefDeletion
from tests.harness.every import every
from tests.harness.stale_uploads import uploads as register
from tests.harness.thorough import whole_only

NAME = "user_status_cleanup"
SIGNS = "\x1b[31m\x1b]0;title\x07\x9b2J\u202e\u2028\r\x7f'\"\\[/red]{}"
NOISE = f"{SIGNS} password='hunter2 hunter2' redis://:hunter2@h/0 "
LONG = NOISE + "x" * 1_000_000 + NOISE
COMMANDS = (
    *("status", "processes", f"ticks {NAME}", f"why {NAME}", "quarantine list", "quarantine show 1"),
    *("objects held", "leases list", "buckets"),
)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def noise(database):
    """What other programs may have written, wherever a command looks."""
    instant = now()
    result = {NOISE: LONG, "many": [NOISE] * 10_000, "number": 10**1_000, "blocked": LONG}
    JobRun.create(
        batch=NAME, state="failed", reason=NOISE, result=result, error=LONG, claimed_by=LONG, started_by=LONG,
        claimed_at=instant, started_at=instant, enqueued_at=instant, finished_at=instant,
    )  # fmt: skip
    Batch.create(
        name=NAME,
        blocked_since=instant, blocked_reason=NOISE, blocked_sentence=LONG,
    )  # fmt: skip
    Hold.add(NAME, "pause", reason=LONG, by=LONG, until=instant + timedelta(days=1))
    quarantine.record_failure(NOISE, NOISE, LONG[:2_000], LONG, reason="unreadable")
    Process.create(
        kind="worker", host=NOISE, pid=1, version=LONG, alive_at=instant, silent_from=instant + timedelta(hours=1),
        queues=[LONG], timetable={NAME: LONG},
        at_work=[{"what": LONG, "run": 1, "message_id": LONG, "seconds": 1.0}],
    )  # fmt: skip
    DeletedObject.create(store_dir=NOISE, file=NOISE, pick_up_at=instant, attempts=MAX_OBJECT_ATTEMPTS)
    GitRefDeletion.create(project_id=1, ref=NOISE, rejected_reason=NOISE)
    client.zadd(register.keys.failed, {f"artifacts:{LONG}": 1})


@whole_only
@every("command", COMMANDS)
def test_no_command_hands_over_what_a_terminal_would_obey(main, command):
    shown = main(*command.split())
    told = main(*command.split(), "--json")

    assert (shown.status, told.status) == (0, 0), shown.stderr + told.stderr
    for text in (shown.stdout, shown.stderr, told.stdout, told.stderr):
        assert not {ord(letter) for letter in text} & CONTROL_ESCAPES.keys()
    assert json.loads(told.stdout) is not None
    assert "hunter2" not in shown.stdout
    assert len(shown.stdout) < 1_000_000


def test_json_has_what_was_written_letter_for_letter(main):
    (entry,) = main("quarantine", "list", "--kind", "message", "--json").json["entries"]

    assert (entry["record"], entry["error"]) == (NOISE, LONG)


def test_json_of_a_number_that_is_too_large_for_it_is_json(main):
    assert main("ticks", NAME, "--json").json["ticks"][0]["result"]["number"] == 10**1_000
