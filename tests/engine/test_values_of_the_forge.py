"""What a forge may have in its rows: times that Python cannot hold, artifacts without a path, text that is none."""

from contextlib import closing
from urllib.parse import urlsplit

import psycopg2
import pytest
from structlog.testing import capture_logs

from demo.tables import make_tables
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.database import database, now
from forgekeeper.platform.installation import Installation
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets import stores
from models import BulkImport, BulkImportEntity, Project
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.many_rows import artifacts, destroy_artifacts, statuses
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers import delete_objects, expired_job_artifacts, git_ref_cleanup
from workers.stale_imports import stale_imports
from workers.user_status_cleanup import user_status_cleanup

OUT_OF_PYTHONS_REACH = ["0044-03-15 12:00:00+00 BC", "-infinity"]
NO_TEXT = r"convert_from('\xff66', 'SQL_ASCII')"


# Values that Python cannot hold


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("instant", OUT_OF_PYTHONS_REACH)
def test_the_backlog_is_known_however_old_its_oldest_is(instant):
    artifacts(3)
    statuses(3)
    BulkImport.create(user_id=1)
    database.execute_sql("update ci_job_artifacts set expire_at = %s", (instant,))
    database.execute_sql("update user_statuses set clear_status_at = %s", (instant,))
    database.execute_sql("update bulk_imports set updated_at = %s", (instant,))
    database.execute_sql("insert into deleted_objects (store_dir, file, pick_up_at) values ('', 'x', %s)", (instant,))

    found = [batch.sum_backlogs(now()) for batch in (expired_job_artifacts.expired_job_artifacts, user_status_cleanup)]
    found += [batch.sum_backlogs(now()) for batch in (stale_imports, delete_objects.delete_objects)]

    assert [one.records for one in found] == [3, 3, 1, 1]
    assert [one.oldest.timestamp() < 0 for one in found] == [True] * 4


# Artifacts without a final path


def put_aside(path, file, which):
    """Take the paths of some artifacts away."""
    statement = f"update ci_job_artifacts set file_final_path = %s, file = %s where {which}"
    database.execute_sql(statement, (path, file))


@pytest.mark.usefixtures("database")
def test_run_preview_backlog_and_breaker_agree_on_artifacts_without_a_path():
    artifacts(20)
    put_aside("", "x.zip", "id <= 3")
    put_aside(None, "x.zip", "id between 4 and 5")
    put_aside("", None, "id = 6")
    database.execute_sql("update ci_job_artifacts set locked = 2 where id > 18")
    batch, child = expired_job_artifacts.expired_job_artifacts, expired_job_artifacts.delete_artifact_bucket

    (shown,) = preview_batch(batch, settings_with()).parts[-1:]

    assert (shown.records, shown.kept) == (13, {"no_path": 5, "unknown": 2})
    assert child.backlogs["expired_artifact"](now()).records == 13
    assert batch.stake(now()).due(100) == 13
    assert (destroy_artifacts(), DeletedObject.select().count()) == (13, 12)
    assert Quarantined.select().count() == 0


# Text that is none, in a database that takes any bytes for text: such a record is a bad one, and stops no other


def passed_over():
    return {(row.batch, row.record, row.key): row.failures for row in Quarantined.select()}


def on_the_server(urls, *statements):
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture
def any_bytes(urls, settings):
    """A database that takes any bytes for text, as the models' own."""
    options = "encoding 'SQL_ASCII' locale_provider libc locale 'C' template template0"
    on_the_server(urls, "drop database if exists any_bytes", f"create database any_bytes {options}")
    odd = settings_with(database_url=urlsplit(urls.database)._replace(path="/any_bytes").geturl(), redis_url=urls.redis)
    configure_clients(odd, ServerTimeouts.for_worker(odd), name="tests", connections=5)
    with database.connection_context():
        migrations.apply_pending(database.obj)
        make_tables(database.obj)
        Installation.update(id=INSTALLATION).execute()
        client.flushdb()
        stores.open_object_store.cache_clear()
        yield
    database.close_all()
    client.connection_pool.disconnect()
    stores.open_object_store.cache_clear()
    on_the_server(urls, "drop database any_bytes")


@pytest.mark.usefixtures("any_bytes")
def test_an_entity_whose_path_is_no_text_stops_no_other():
    for path in (NO_TEXT, "'group/ü'", "'group/x'"):
        columns = "bulk_import_id, source_full_path, destination_name, destination_namespace, updated_at"
        database.execute_sql(
            f"insert into bulk_import_entities ({columns}) values (1, {path}, '', '', now() - interval '2 days')"
        )

    with capture_logs() as lines:
        outcome = perform(stale_imports)

    assert (outcome.entities, outcome.failed, passed_over()) == (2, 1, {("stale_imports", "entity", "1"): 1})
    assert BulkImportEntity.select(BulkImportEntity.status).where(BulkImportEntity.id == 1).scalar() == 0
    assert [line["source_full_path"] for line in lines if "source_full_path" in line] == ["group/ü", "group/x"]


@pytest.mark.usefixtures("any_bytes")
def test_a_ref_that_is_no_text_stops_no_other(settings, tmp_path):
    repository = BareRepository(put_root(tmp_path / "repositories"))
    repository.packed("refs/mr/1", "refs/mr/ü")
    Project.create(id=7, disk_path=repository.disk_path)
    for ref in (NO_TEXT, "'refs/mr/1'", "'refs/mr/ü'"):
        database.execute_sql(f"insert into batched_git_ref_updates_deletions (project_id, ref) values (7, {ref})")
    settings = settings.model_copy(update={"repositories_root": tmp_path / "repositories"})

    outcome = perform(git_ref_cleanup.clean_project_refs, 7, settings=settings)

    assert (outcome.total_deletes, outcome.stopped) == (2, "drained")
    assert (set(repository.refs()) & {"refs/mr/1", "refs/mr/ü"}, list(passed_over().values())) == (set(), [1])
