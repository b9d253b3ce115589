"""Every command that changes something leaves one act; one that cannot be recorded changes nothing."""

import json
import os
import pwd
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import ANY
from uuid import uuid4

import pytest
from psycopg2.extensions import make_dsn

from forgekeeper import database as db
from forgekeeper.audit.acts import Act
from forgekeeper.connections import client
from forgekeeper.coordination import leases as locks
from forgekeeper.database import now
from forgekeeper.installation.in_redis import INSTALLATION as OF_REDIS
from forgekeeper.runs import quarantine
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import sentinel, stores
from forgekeeper.storage.outbox import MAX_ATTEMPTS, DeletedObject
from models import DeletionStatus, GitRefDeletion, JobArtifact
from tests.harness.every import every
from tests.harness.installation import INSTALLATION
from workers.stale_direct_uploads import adoption, register

from .every_command import commands

BATCH, UPLOADS = "user_status_cleanup", "stale_direct_uploads"
FLAG = "bulk_delete_job_artifacts"
ALL = {words for words, _command in commands()}
ME = pwd.getpwuid(os.getuid()).pw_name

pytestmark = pytest.mark.usefixtures("database")


class Case(NamedTuple):
    """A command line, what it finds, and the acts that it leaves."""

    line: str
    act: dict[str, Any]
    arrange: Callable[..., object] = lambda _folder: None

    @property
    def command(self):
        return self.act["act"]


def act(command, what, *, batch=None, reason=None, before=None, after=None):
    return {"act": command, "what": what, "batch": batch, "reason": reason, "before": before, "after": after}


def failed_uploads(*members):
    return lambda _folder: client.zadd(register.FAILED, dict.fromkeys(members, 1))


def adopted_uploads(*paths):
    return lambda _folder: adoption.adopt(client, "artifacts", paths)


def an_orphan(folder):
    for path in ("a/orphan", *(f"a/{number}" for number in range(10))):
        file = folder / "objects" / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
        os.utime(file, (0, 0))
        if path != "a/orphan":
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)


def dead_objects(number):
    def arrange(_folder):
        for name in range(number):
            DeletedObject.create(store_dir="a", file=str(name), attempts=MAX_ATTEMPTS)

    return arrange


def refused_refs(number):
    def arrange(_folder):
        for name in range(number):
            values = {"reason": "invalid_name", "status": DeletionStatus.REJECTED}
            GitRefDeletion.create(project_id=7, ref=f"refs/a..{name}", **values)

    return arrange


def bad_records(_folder):
    quarantine.fail(BATCH, "user_status", "7", "it is bad", reason="record_failed")


def a_waiting_run(_folder):
    JobRun.create(batch=BATCH, state="claimed", tick="2026-11-20 08:30+0", claimed_by="a", claimed_at=now())


def a_lease(_folder):
    client.set(f"{locks.KEY}refs:7", "0123 1790000000 forge-2:77", ex=60)


def one(name):
    return {"count": 1, "first": [name]}


def two(*names):
    return {"count": 2, "first": list(names)}


CASES = [
    Case(f"flags on {FLAG}", act("flags on", FLAG, before={"on": False}, after={"on": True})),
    Case(f"flags off {FLAG}", act("flags off", FLAG, before={"on": False}, after={"on": False})),
    Case(f"run {BATCH}", act("run", "run 1", batch=BATCH, after={"run": 1, "taken_over": False})),
    Case(
        f"run {BATCH}",
        act(
            "run",
            "run 1",
            batch=BATCH,
            before={"state": "claimed", "tick": "2026-11-20 08:30:00+00:00"},
            after={"run": 1, "taken_over": True},
        ),
        a_waiting_run,
    ),
    Case(f"send {BATCH}", act("send", "run 1", batch=BATCH, after={"run": 1})),
    Case("leases break refs:7", act("leases break", "refs:7", before={"holder": "forge-2:77", "since": ANY}), a_lease),
    Case(
        "quarantine retry 1",
        act("quarantine retry", "1", batch=BATCH, before=one("record user_status 7: it is bad")),
        bad_records,
    ),
    Case(
        "quarantine discard --all",
        act("quarantine discard", "all", before=one("record user_status 7: it is bad")),
        bad_records,
    ),
    Case(
        "quarantine retry object:1",
        act("quarantine retry", "object:1", batch="delete_objects", before={"kind": "object"} | one("1")),
        dead_objects(2),
    ),
    Case(
        "quarantine retry --all --kind ref",
        act("quarantine retry", "all", batch="git_ref_cleanup", before={"kind": "ref"} | two("1", "2")),
        refused_refs(2),
    ),
    Case(
        "quarantine discard upload:artifacts:a/b",
        act(
            "quarantine discard",
            "upload:artifacts:a/b",
            batch=UPLOADS,
            before={"kind": "upload"} | one("artifacts:a/b"),
        ),
        failed_uploads("artifacts:a/b", "artifacts:c"),
    ),
    Case(
        "uploads reconcile artifacts --prefix a --yes --expect 1",
        act("uploads reconcile", "artifacts:a", batch=UPLOADS, after={"expected": 1} | one("a/orphan")),
        an_orphan,
    ),
    Case(
        "uploads forget artifacts:a/b",
        act("uploads forget", "artifacts:a/b", batch=UPLOADS, before=one("artifacts:a/b")),
        adopted_uploads("a/b", "c"),
    ),
    Case(
        "uploads forget --all --prefix a",
        act("uploads forget", "all below a", batch=UPLOADS, before=one("artifacts:a/b")),
        adopted_uploads("a/b", "c"),
    ),
    Case("seed --scale 0", act("seed", "sample data", after={"scale": 0})),
]
ELSEWHERE = {
    *("check", "migrate", "up", "pause", "resume", "stop", "cancel", "release"),
    *("refs restore", "objects hold", "objects unhold"),
}
"""They leave acts, too: how, is further below or in the tests of their own."""
LOOKING = {
    *("settings", "metrics", "batches", "status", "processes", "ticks", "why", "audit"),
    *("leases", "leases list", "quarantine", "quarantine list", "quarantine show", "uploads", "objects"),
    *("objects held", "refs", "buckets", "flags", "flags list"),
}
NOT_RECORDED = {
    *("scheduler", "worker", "exporter"),  # not a person's act but a process: it has its row, and its runs theirs
    "demo",  # of servers that end with it
}
NOTHING_TO_DO = [
    *("quarantine retry --all", "quarantine discard --all", "uploads forget --all"),
]
every_case = every("case", CASES, name=lambda case: case.line)


@pytest.fixture
def folder(tmp_path):
    """The folder of an object store."""
    (tmp_path / "objects").mkdir()
    stores._opened.clear()
    sentinel.Store("artifacts", f"file://{tmp_path}/objects").create_sentinel(INSTALLATION)
    yield tmp_path
    stores._opened.clear()


@pytest.fixture
def call(main, folder):
    """Run a command line as Anna."""

    def run(line, **settings):
        settings = {"OBJECT_STORES": json.dumps({"artifacts": f"file://{folder}/objects"}), "ACTOR": "Anna"} | settings
        return main(*line.split(), **settings)

    return run


@pytest.fixture
def without_grant(urls, query):
    """The URL of the database as a role that may do everything but record acts."""
    name = f"test_{uuid4().hex}"
    query(
        urls.database,
        f"create role {name} login password 'x'; grant all on schema public to {name};"
        f" grant all on all tables in schema public to {name}; revoke insert on audit_acts from {name}",
    )
    yield make_dsn(urls.database, user=name, password="x")
    query(urls.database, f"drop owned by {name}; drop role {name}")


def empty():
    """Let nothing of an earlier row of the table lie about."""
    tables = "job_runs, quarantine, ci_deleted_objects, ci_job_artifacts, feature_flags, batches"
    db.database.execute_sql("set session_replication_role = replica")
    db.database.execute_sql(f"truncate {tables}, batched_git_ref_updates_deletions, audit_acts restart identity")
    db.database.execute_sql("set session_replication_role = default")
    client.flushdb()


def recorded():
    rows = Act.select().order_by(Act.id).dicts()
    return [{name: row[name] for name in ("act", "what", "batch", "reason", "before", "after")} for row in rows]


def everything():
    """All that a command could have changed, in PostgreSQL and Redis."""
    names = (
        "select table_name from information_schema.tables where table_schema = 'public' and table_type = 'BASE TABLE'"
    )
    tables = {}
    for (name,) in db.database.execute_sql(names).fetchall():
        digest = f"select md5(string_agg(t::text, ' ' order by t::text)) from {name} as t"
        tables[name] = db.database.execute_sql(digest).fetchone()
    return tables, {key: client.dump(key) for key in client.scan_iter() if key.decode() != OF_REDIS}


def test_every_command_is_known_to_leave_an_act_or_to_only_look():
    acting = {case.command for case in CASES} | ELSEWHERE

    assert ALL - acting - LOOKING - NOT_RECORDED == set()
    assert acting & LOOKING == set()


@every_case
def test_a_command_leaves_one_act_of_whoever_ran_it(call, folder, case):
    empty()
    case.arrange(folder)

    result = call(case.line)

    assert result.status == 0, result.stderr
    assert recorded() == [case.act]
    assert Act.select(Act.by_user, Act.actor).tuples().get() == (ME, "Anna")


@every_case
def test_what_cannot_be_recorded_is_not_done(call, folder, without_grant, case):
    empty()
    case.arrange(folder)
    before = everything()

    result = call(case.line, DATABASE_URL=without_grant)

    assert result.status == 1
    assert "permission denied for table audit_acts; grant that to the user of the database" in result.sentences[-1]
    assert everything() == before


@every("case", [case for case in CASES if case.command != "seed"], name=lambda case: case.line)
def test_where_the_audit_is_off_a_command_works_without_a_word_to_it(call, folder, without_grant, case):
    empty()
    case.arrange(folder)

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


def test_a_sentinel_that_cannot_be_recorded_is_not_made(call, folder, without_grant):
    sentinel_of(folder).unlink()

    result = call("check --init", DATABASE_URL=without_grant)

    assert "grant insert on audit_acts to" in result.stdout
    assert not sentinel_of(folder).exists()
    assert client.get(OF_REDIS) is None


def sentinel_of(folder):
    return folder / "objects" / sentinel.NAME
