"""Text that is none, in a database that takes any bytes for text: each such record is a bad one, and stops no other."""

from contextlib import closing
from urllib.parse import urlsplit

import psycopg2
import pytest
from structlog.testing import capture_logs

from demo.tables import make_tables
from forgekeeper import migrations
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database
from forgekeeper.installation import Installation
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.storage import stores
from models import BulkImportEntity, Project
from tests.harness.git_samples import Bare, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers import git_ref_cleanup, stale_imports

NO_TEXT = r"convert_from('\xff66', 'SQL_ASCII')"

pytestmark = pytest.mark.usefixtures("any_bytes")


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
    connect(odd, Limits.of_worker(odd), name="tests", connections=5)
    with database.connection_context():
        migrations.migrate(database.obj)
        make_tables(database.obj)
        Installation.update(id=INSTALLATION).execute()
        client.flushdb()
        stores.opened.cache_clear()
        yield
    database.close_all()
    client.connection_pool.disconnect()
    stores.opened.cache_clear()
    on_the_server(urls, "drop database any_bytes")


def test_an_entity_whose_path_is_no_text_stops_no_other():
    for path in (NO_TEXT, "'group/ü'", "'group/x'"):
        columns = "bulk_import_id, source_full_path, destination_name, destination_namespace, updated_at"
        database.execute_sql(
            f"insert into bulk_import_entities ({columns}) values (1, {path}, '', '', now() - interval '2 days')"
        )

    with capture_logs() as lines:
        outcome = perform(stale_imports.stale_imports)

    assert (outcome.entities, outcome.failed, passed_over()) == (2, 1, {("stale_imports", "entity", "1"): 1})
    assert BulkImportEntity.select(BulkImportEntity.status).where(BulkImportEntity.id == 1).scalar() == 0
    assert [line["source_full_path"] for line in lines if "source_full_path" in line] == ["group/ü", "group/x"]


def test_a_ref_that_is_no_text_stops_no_other(settings, tmp_path):
    repository = Bare(put_root(tmp_path / "repositories"))
    repository.packed("refs/mr/1", "refs/mr/ü")
    Project.create(id=7, disk_path=repository.disk_path)
    for ref in (NO_TEXT, "'refs/mr/1'", "'refs/mr/ü'"):
        database.execute_sql(f"insert into batched_git_ref_updates_deletions (project_id, ref) values (7, {ref})")
    settings = settings.model_copy(update={"repositories_root": tmp_path / "repositories"})

    outcome = perform(git_ref_cleanup.clean_project_refs, 7, settings=settings)

    assert (outcome.total_deletes, outcome.stopped) == (2, "drained")
    assert (set(repository.refs()) & {"refs/mr/1", "refs/mr/ü"}, list(passed_over().values())) == (set(), [1])
