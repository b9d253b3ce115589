"""`migrate` refuses, or waits, while processes live whose version would fail on the new tables."""

import shutil
from datetime import timedelta

import pytest

from forgekeeper.platform import database as db
from forgekeeper.platform import migrations
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import open_pool
from tests.harness.programs import Program, eventually
from tests.harness.thorough import whole_only

MINUTE = timedelta(minutes=1)
LAST, OLDER = "0017_one_quarantine", "0016_quarantine"
LIVING = """
    insert into processes (kind, host, pid, version, migration, alive_at, silent_from)
    values ('worker', 'web1', 7, '0.9', '{knows}', now(), now() + interval '{for_minutes} minutes')
"""


@pytest.fixture
def migrated_long_ago(new_database, tmp_path):
    """Make a database as a version that knows no migration after `LAST` has left it; return its URL."""
    shutil.copytree(migrations.OWN_MIGRATIONS.folder, folder := tmp_path / "forgekeeper")
    for file in folder.glob("0*.py"):
        if file.stem > LAST:
            file.unlink()
    url, pointed = new_database(), db.database.obj
    open_pool(url, Timeouts(*[MINUTE] * 5), name="tests", size=1, schemas=("public", "public"))
    try:
        with db.database.connection_context():
            migrations.apply_pending(db.database.obj, migrations.OWN_MIGRATIONS._replace(folder=folder))
        db.database.close_all()
    finally:
        db.database.initialize(pointed)
    return url


def test_processes_that_would_fail_on_the_new_tables_are_named_and_nothing_is_changed(main, query, migrated_long_ago):
    query(migrated_long_ago, LIVING.format(knows=OLDER, for_minutes=60))

    refused = main("migrate", DATABASE_URL=migrated_long_ago)
    looked = main("migrate", "--check", "--json", DATABASE_URL=migrated_long_ago)

    assert (refused.status, looked.status) == (1, 1)
    assert "worker web1:7 (version 0.9); stop them, or let `forgekeeper migrate --wait` wait" in refused.complaint
    assert looked.json["too_old"] == ["worker web1:7 (version 0.9)"]
    assert "0018_own_schema" in looked.json["pending"]


@pytest.mark.parametrize(("knows", "for_minutes"), [(LAST, 60), (OLDER, -1)])
def test_processes_of_the_last_version_and_those_that_have_expired_hold_nothing_up(
    main, query, migrated_long_ago, knows, for_minutes
):
    query(migrated_long_ago, LIVING.format(knows=knows, for_minutes=for_minutes))

    done = main("migrate", "--json", DATABASE_URL=migrated_long_ago)

    assert (done.status, done.json["applied"][0]) == (0, "0018_own_schema")


@whole_only
def test_migrate_waits_if_asked_to_until_such_a_process_has_ended(query, migrated_long_ago, tmp_path):
    query(migrated_long_ago, LIVING.format(knows=OLDER, for_minutes=60))
    words = ("-m", "forgekeeper.cli", "migrate", "--wait")
    waiting = Program(tmp_path / "log", *words, database_url=migrated_long_ago)
    try:
        eventually(lambda: "waiting until these processes have ended: worker web1:7 (version 0.9)" in waiting.text())
        query(migrated_long_ago, "delete from processes")
        status = waiting.process.wait(60)
    finally:
        waiting.kill()

    assert (status, "applied: 0018_own_schema" in waiting.text()) == (0, True)
