"""Forgejo's own table, kept clean by real schedulers and workers while Forgejo's own job works on the same rows."""

import json
import os
from contextlib import suppress
from pathlib import Path
from time import time

import pytest

from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.targets import sentinel
from forges.forgejo.adoption import ADOPTION_CLASS
from tests.cli.test_adopting_forgejo import OUTCOME, SECONDS
from tests.harness.adopted import adopt, as_keeper, role_of_forgekeeper, session
from tests.harness.gitlab_tables import rows
from tests.harness.installation import INSTALLATION
from tests.harness.stale_uploads import uploads as register
from tests.harness.stores import Folder
from tests.harness.tables import empty
from tests.harness.waiting import wait_until

TABLES = (Path(__file__).parents[1] / "harness" / "forgejo_tables.sql").read_text()
VIEWS = "forgekeeper_forgejo"
ROWS = 12_000
LIMIT = 120.0
TWO_DAYS_SECONDS = 2 * 86_400
PATHS = "select storage_path from action_artifact where storage_path <> '' and status {} order by id"
EXPIRED = f"select id, storage_path from action_artifact where status = 2 and expired_unix < {SECONDS} order by id"
MARK = f"update action_artifact set status = 4, updated_unix = {SECONDS} where id = %s"
OUTBOX = "select count(*) from forgekeeper.deleted_objects"
LEAKED_SHARE = 10
"""One of so many files stays when Forgejo's job deletes them: it does not try again."""
OLD_CHUNK, NEW_CHUNK = "tmpv4812/812-5-0-100.chunk", "tmpv4813/813-6-0-100.chunk"


@pytest.fixture
def forgejo(settings, urls, _migrated):
    """Tables of Forgejo's shape with views of them; a cursor of their owner."""
    with session(urls.database) as cursor, role_of_forgekeeper(cursor):
        cursor.connection.commit()
        cursor.connection.autocommit = True
        cursor.execute("create schema forgejo; set search_path = forgejo")
        cursor.execute(TABLES.replace("generate_series(1, 600)", f"generate_series(1, {ROWS})"))
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=2)
        with db.database.connection_context():
            empty()
            client.flushdb()
            adopt(kind=ADOPTION_CLASS, tables="forgejo", views=VIEWS)
        db.database.close_all()
        yield cursor
        cursor.execute(f"drop schema {VIEWS} cascade; drop schema forgejo cascade")


@pytest.fixture
def store(forgejo, fast_folder):
    """The store, with the files of all rows that have not expired, and chunks of two uploads."""
    store = Folder(fast_folder / "actions_artifacts")
    sentinel.Store("artifacts", store.url).create_sentinel(INSTALLATION)
    store.put(NEW_CHUNK)
    old = [OLD_CHUNK, *(path for (path,) in rows(forgejo, PATHS.format("not in (4, 6)")))]
    store.put(*old)
    for path in old:
        os.utime(store.root / path, times=(time() - TWO_DAYS_SECONDS,) * 2)
    return store


def work_as_forgejo(url, root):
    """Mark all expired artifacts one by one, and delete the files of all but a tenth, which Forgejo forgets."""
    with session(url) as cursor:
        cursor.connection.autocommit = True
        cursor.execute("set search_path = forgejo")
        for number, (row, path) in enumerate(rows(cursor, EXPIRED)):
            cursor.execute(MARK, (row,))
            if number % LEAKED_SHARE:
                with suppress(FileNotFoundError):
                    (root / path).unlink()


def test_artifacts_expire_beside_forgejos_own_job_and_what_it_leaks_is_deleted(forgejo, store, services, urls):
    expected = rows(forgejo, OUTCOME)
    settings = {
        **{f"CRON_{name}": "*/2 * * * * *" for name in ("EXPIRED_JOB_ARTIFACTS", "DELETE_OBJECTS")},
        "CRON_STALE_DIRECT_UPLOADS": "*/2 * * * * *",
        **{f"CRON_{name}": "off" for name in ("USER_STATUS_CLEANUP", "GIT_REF_CLEANUP", "STALE_IMPORTS", "PRUNE")},
        "DATABASE_URL": as_keeper(urls.database),
        "FORGE_SCHEMA": VIEWS,
        "OBJECT_STORES": json.dumps({"artifacts": store.url}),
    }

    def command(*words):
        return services("-".join(words[:2]), *words, **settings).process.wait(LIMIT)

    assert command("flags", "on", "bulk_delete_job_artifacts") == 0
    running = [services(name, name, **settings) for name in ("scheduler", "worker")]
    assert wait_until(lambda: rows(forgejo, OUTBOX) != [(0,)], LIMIT)
    work_as_forgejo(urls.database, store.root)

    statuses = "select id, status from action_artifact order by id"
    assert wait_until(lambda: rows(forgejo, statuses) == expected and rows(forgejo, OUTBOX) == [(0,)], LIMIT)
    assert command("uploads", "reconcile", "artifacts", "--prefix", "", "--yes") == 0
    for upload, due_at in client.zrange(register.keys.pending, 0, -1, withscores=True):
        client.zadd(register.keys.pending, {upload: due_at - TWO_DAYS_SECONDS})
    kept = {path for (path,) in rows(forgejo, PATHS.format("not in (4, 6)"))} | {NEW_CHUNK}
    wait_until(lambda: store.keys() == kept, LIMIT)

    assert [service.stop() for service in running] == [0, 0]
    assert store.keys() == kept
    assert rows(forgejo, statuses) == expected
    assert rows(forgejo, "select count(*) from forgekeeper.quarantine") == [(0,)]
