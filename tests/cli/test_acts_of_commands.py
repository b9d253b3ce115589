"""Every command that changes something leaves one act; one that cannot be recorded changes nothing."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination import leases as locks
from forgekeeper.platform.database import now
from forgekeeper.platform.installation import INSTALLATION_KEY as OF_REDIS
from forgekeeper.targets import sentinel
from models import DeletionStatus, GitRefDeletion, JobArtifact
from tests.harness.every import every
from tests.harness.stale_uploads import uploads
from tests.harness.thorough import whole_only

from .every_command import arguments, commands

BATCH, UPLOADS = "user_status_cleanup", "stale_direct_uploads"
FLAG = "bulk_delete_job_artifacts"
ALL = dict(commands())
ME = pwd.getpwuid(os.getuid()).pw_name

pytestmark = pytest.mark.usefixtures("database")


class Case(NamedTuple):
    """A command line, the act that it leaves, by its parts, and what it finds."""

    line: str
    command: str
    what: str
    batch: str | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    arrange: Callable[[Path], object] = lambda _store: None
    reason: str | None = None


def adopted_uploads(_store):
    uploads.adopt(client, "artifacts", ["a/b", "c"])


def an_orphan(store):
    for path in ("a/orphan", *(f"a/{number}" for number in range(10))):
        file = store / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
        os.utime(file, (0, 0))
        if path != "a/orphan":
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)


def refused_refs(_store):
    for name in ("refs/a..0", "refs/a..1"):
        GitRefDeletion.create(project_id=7, ref=name, reason="invalid_name", status=DeletionStatus.REJECTED)


def bad_records(_store):
    quarantine.record_failure(BATCH, "user_status", "7", "it is bad", reason="record_failed")


def a_waiting_run(_store):
    JobRun.create(batch=BATCH, state="claimed", tick=TICK, claimed_by="a", claimed_at=now())


def a_lease(_store):
    client.set(f"{locks.LEASE_KEY_PREFIX}refs:7", "0123 1790000000 forge-2:77", ex=60)


TICK = "2026-11-20 08:30:00+00:00"
WAITED = {"state": "claimed", "tick": TICK}
BAD = {"count": 1, "first": ["record user_status 7: it is bad"]}
REFS = {"kind": "ref", "count": 2, "first": ["1", "2"]}
ADOPTED, ORPHAN = {"count": 1, "first": ["artifacts:a/b"]}, {"expected": 1, "count": 1, "first": ["a/orphan"]}
RECONCILE = "uploads reconcile artifacts --prefix a --yes --expect 1"
CASES = [
    Case(f"flags on {FLAG}", "flags on", FLAG, before={"on": False}, after={"on": True}),
    Case(f"flags off {FLAG}", "flags off", FLAG, before={"on": False}, after={"on": False}),
    Case(f"run {BATCH}", "run", "run 1", BATCH, after={"run": 1, "taken_over": False}),
    Case(f"run {BATCH}", "run", "run 1", BATCH, WAITED, {"run": 1, "taken_over": True}, a_waiting_run),
    Case(f"send {BATCH}", "send", "run 1", BATCH, after={"run": 1}),
    Case(f"pause {BATCH} --reason because", "pause", BATCH, BATCH, {"holds": []}, {"holds": [ANY]}, reason="because"),
    Case("leases break refs:7", "leases break", "refs:7", None, {"holder": "forge-2:77", "since": ANY}, None, a_lease),
    Case("quarantine retry 1", "quarantine retry", "1", BATCH, BAD, None, bad_records),
    Case("quarantine discard --all", "quarantine discard", "all", None, BAD, None, bad_records),
    Case("quarantine retry --all --kind ref", "quarantine retry", "all", "git_ref_cleanup", REFS, None, refused_refs),
    Case(RECONCILE, "uploads reconcile", "artifacts:a", UPLOADS, None, ORPHAN, an_orphan),
    Case("uploads forget artifacts:a/b", "uploads forget", "artifacts:a/b", UPLOADS, ADOPTED, None, adopted_uploads),
    Case("seed --scale 0", "seed", "sample data", after={"scale": 0}),
]
ELSEWHERE = {
    *("check", "migrate", "up", "resume", "stop", "cancel", "release"),
    *("refs restore", "objects keep", "objects hold", "objects unhold", "exclude add", "exclude remove"),
}
"""They leave acts, too: how, is further below or in the tests of their own."""
NOT_RECORDED = {
    *("scheduler", "worker", "exporter"),  # not a person's act but a process: it has its row, and its runs theirs
    "demo",  # of servers that end with it
    *("console", "console user add", "console user remove", "console user list", "console user"),  # a file of its own
    *("console token add", "console token remove", "console token list", "console token"),  # a file of its own
    *("refs", "uploads"),  # groups: they list nothing
    "webhook test",  # it needs a receiver
}
LOOKING = sorted(ALL.keys() - {case.command for case in CASES} - ELSEWHERE - NOT_RECORDED)
NOTHING_TO_DO = ["quarantine retry --all", "quarantine discard --all", "uploads forget --all"]
every_case = every("case", CASES, name=lambda case: case.line)


@pytest.fixture
def call(main, store):
    """Run a command line as Anna."""
    return lambda line, **settings: main(*line.split(), **{"ACTOR": "Anna"} | settings)


@pytest.fixture
def without_grant(urls, new_role):
    """The URL of the database as a role that may do everything but record acts."""
    return new_role(
        urls.database,
        "grant all on schema public to ROLE; grant all on all tables in schema public, forgekeeper to ROLE;"
        " revoke insert on audit_acts from ROLE",
    )


def empty():
    """Let nothing of an earlier row of the table lie about."""
    tables = "job_runs, quarantine, deleted_objects, ci_job_artifacts, feature_flags, batches, holds"
    db.database.execute_sql("set session_replication_role = replica")
    db.database.execute_sql(f"truncate {tables}, batched_git_ref_updates_deletions, audit_acts restart identity")
    db.database.execute_sql("set session_replication_role = default")
    client.flushdb()


def recorded():
    return list(Act.select(Act.act, Act.what, Act.batch, Act.reason, Act.before, Act.after).order_by(Act.id).tuples())


def everything():
    """All that a command could have changed, in PostgreSQL and Redis."""
    names = "select table_name from information_schema.tables where table_schema in ('public', 'forgekeeper') and table_type = 'BASE TABLE'"
    tables = {}
    for (name,) in db.database.execute_sql(names).fetchall():
        digest = f"select md5(string_agg(t::text, ' ' order by t::text)) from {name} as t"
        tables[name] = db.database.execute_sql(digest).fetchone()
    return tables, {key: client.dump(key) for key in client.scan_iter() if key.decode() != OF_REDIS}


@whole_only
@every("command", LOOKING)
def test_a_command_that_leaves_no_act_changes_nothing(call, command):
    empty()
    before = everything()

    result = call(f"{command} {' '.join(arguments(command, ALL[command]))}")

    assert (result.status in {0, 1}, everything() == before) == (True, True), result.stderr


@every_case
def test_a_command_leaves_one_act_of_whoever_ran_it(call, store, case):
    empty()
    case.arrange(store)

    result = call(case.line)

    assert result.status == 0, result.stderr
    assert recorded() == [(case.command, case.what, case.batch, case.reason, case.before, case.after)]
    assert Act.select(Act.by_user, Act.actor).tuples().get() == (ME, "Anna")


@every_case
def test_what_cannot_be_recorded_is_not_done(call, store, without_grant, case):
    empty()
    case.arrange(store)
    before = everything()

    result = call(case.line, DATABASE_URL=without_grant)

    assert result.status == 1
    assert "permission denied for table audit_acts; grant that right to the database user" in result.sentences[-1]
    assert everything() == before


@whole_only
@every("case", [case for case in CASES if case.command != "seed"], name=lambda case: case.line)
def test_where_the_audit_is_off_a_command_works_without_a_word_to_it(call, store, without_grant, case):
    empty()
    case.arrange(store)

    assert call(case.line, DATABASE_URL=without_grant, AUDIT="off").status == 0
    assert recorded() == []


@every("line", NOTHING_TO_DO)
def test_where_there_is_nothing_to_do_there_is_no_act(call, line):
    assert call(line).status == 0
    assert recorded() == []


def test_migrate_records_what_it_applied_also_where_it_has_made_the_table_of_acts(call, new_database, query):
    url = new_database()

    applied = call("migrate --json", DATABASE_URL=url).json["applied"]

    assert len(applied) > 1
    assert query(url, "select act, what, after from audit_acts") == [("migrate", "the schema", {"applied": applied})]


def test_a_sentinel_that_cannot_be_recorded_is_not_made(call, store, without_grant):
    (store / sentinel.SENTINEL_NAME).unlink()

    result = call("check --init", DATABASE_URL=without_grant)

    assert "grant insert on forgekeeper.audit_acts to" in result.stdout
    assert not (store / sentinel.SENTINEL_NAME).exists()
    assert client.get(OF_REDIS) is None
