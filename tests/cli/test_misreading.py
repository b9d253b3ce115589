"""Tables of which a batch would take a part for the whole: `check` names them, and no batch runs on them."""

import json
from contextlib import closing
from threading import Thread

import psycopg2
import pytest

from forgekeeper.targets import sentinel
from tests.harness.every import every
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

PARTITIONED = """
    alter table {0} rename to plain;
    create table whole (like plain including defaults) partition by list ({1});
    create table {0} partition of whole for values in ({2});
    create table others partition of whole default;
    insert into whole select * from plain;
    drop table plain;
"""


class Forge:
    """A forge's database with sample data, a store with the object of a live artifact, and what runs on them."""

    def __init__(self, main, query, url, folder):
        self._main, self._query, self._url = main, query, url
        (folder / "live").mkdir()
        self.object = folder / "live" / "one"
        self.object.touch()
        sentinel.Folder(folder).create_sentinel(self.ask("select id::text from installation")[0][0])
        self.settings = {"DATABASE_URL": url, "OBJECT_STORES": json.dumps({"artifacts": folder.as_uri()})}
        self.ask("insert into feature_flags values ('bulk_delete_job_artifacts', true)")

    def ask(self, sql):
        return self._query(self._url, sql)

    def run(self, batch):
        result = self._main("run", batch, "--json", **self.settings)
        assert result.status == (3 if "blocked" in result.json else 0), result.stderr
        return result.json

    def reconcile(self):
        return self._main("uploads", "reconcile", "artifacts", "--prefix", "", "--yes", **self.settings)

    def errors(self, subject="contract"):
        found = self._main("check", "--json", **self.settings).findings(subject)
        return [message for level, message in found if level == "error"]


@pytest.fixture
def forge(main, query, server, own_database, tmp_path):
    server.flushdb()
    (tmp_path / "objects").mkdir()
    return Forge(main, query, own_database, tmp_path / "objects")


def make_a_partition(forge):
    """Let the table be one partition; a live artifact in another one names an object that the outbox names, too."""
    forge.ask(PARTITIONED.format("ci_job_artifacts", "partition_id", "100"))
    forge.ask(
        "insert into whole (id, project_id, job_id, partition_id, file_type, file_final_path, locked)"
        " values (1000000, 1, 1, 101, 1, 'live/one', 1);"
        "insert into deleted_objects (store_dir, file) values ('live', 'one')"
    )


@whole_only
@every("batch", ["expired_job_artifacts", "delete_objects", "stale_direct_uploads"])
def test_no_batch_runs_on_one_partition_of_a_larger_table(forge, batch):
    if forge.ask("select to_regclass('whole')") == [(None,)]:
        make_a_partition(forge)
    before = forge.ask("select count(*) from whole")

    result = forge.run(batch)

    assert (result["skipped"], result["blocked"] in forge.errors()[0]) == ("schema", True)
    assert (forge.ask("select count(*) from whole"), forge.object.exists()) == (before, True)


@whole_only
def test_a_partitioned_table_is_worked_on_whole(forge):
    make_a_partition(forge)
    forge.ask("delete from whole where id = 1000000; alter table ci_job_artifacts rename to first")
    forge.ask("alter table whole rename to ci_job_artifacts; update ci_job_artifacts set partition_id = 100 + id % 2")

    result = forge.run("expired_job_artifacts")

    assert sum(child["destroyed"] for child in result["children"]) == 600
    assert (forge.ask("select count(*) from ci_job_artifacts"), forge.errors()) == ([(400,)], [])


HALF_DETACHED = "select true from pg_inherits where inhdetachpending"
CANCEL = "select pg_cancel_backend(pid) from pg_stat_activity where query like 'alter table % concurrently'"


def interrupt_a_detachment(forge, url):
    """Detach `second` from the artifacts; a session that reads them lets it wait until it is cancelled."""

    def detach():
        with pytest.raises(psycopg2.errors.QueryCanceled):
            forge.ask("alter table ci_job_artifacts detach partition second concurrently")

    detachment = Thread(target=detach)
    with closing(psycopg2.connect(url)) as reader, reader.cursor() as cursor:
        cursor.execute("select from ci_job_artifacts")
        detachment.start()
        assert wait_until(lambda: forge.ask(HALF_DETACHED), 10)
        forge.ask(CANCEL)
        detachment.join()


def test_what_a_half_detached_partition_names_stays_until_that_is_attached_again(forge, own_database):
    make_a_partition(forge)
    forge.ask(
        "alter table ci_job_artifacts rename to first; alter table whole rename to ci_job_artifacts;"
        "alter table ci_job_artifacts detach partition others; alter table others rename to second;"
        "alter table ci_job_artifacts attach partition second for values in (101)"
    )
    interrupt_a_detachment(forge, own_database)

    result, errors = forge.run("delete_objects"), forge.errors()

    assert forge.object.exists()
    assert result["blocked"].startswith("partition second is half detached from ci_job_artifacts, which hides its rows")
    assert any(result["blocked"] in error for error in errors)
    cure = "alter table ci_job_artifacts detach partition second finalize"
    assert f"`{cure}`" in result["blocked"]
    forge.ask(f"{cure}; alter table ci_job_artifacts attach partition second for values in (101)")
    assert (forge.run("delete_objects")["deleted"], forge.object.exists(), forge.errors()) == (0, True, [])


@whole_only
def test_a_batch_whose_table_is_missing_is_blocked_and_says_where_to_look_and_the_others_run(forge):
    forge.ask("drop table batched_git_ref_updates_deletions")

    result, others = forge.run("git_ref_cleanup"), [forge.run(name) for name in ("user_status_cleanup", "prune")]

    sentence = (
        "table batched_git_ref_updates_deletions is missing: `forgekeeper contract --batch git_ref_cleanup` shows"
    )
    assert (result["skipped"], result["blocked"].startswith(sentence)) == ("schema", True)
    assert [other.get("blocked") for other in others] == [None, None]


def test_uploads_that_the_forge_registers_elsewhere_are_an_error_and_block_the_batch(forge, server):
    server.hset("pending_direct_uploads", "artifacts:a/b", "1")

    (message,) = forge.errors("redis")
    result, reconciled = forge.run("stale_direct_uploads"), forge.reconcile()

    assert message.startswith("Redis has a hash pending_direct_uploads with 1 uploads, which this batch does not read")
    assert "set FORGEKEEPER_UPLOADS_REGISTER=hash" in message
    assert (result["skipped"], result["blocked"]) == ("schema", message)
    assert (reconciled.status, message in reconciled.complaint) == (3, True)


@whole_only
def test_what_the_forge_registers_in_its_hash_is_worked_on_where_a_setting_says_so(forge, server):
    (stale := forge.object.with_name("stale")).touch()
    server.hset(
        "pending_direct_uploads", mapping={"artifacts:live/stale": "1", "artifacts:live/fresh": server.time()[0]}
    )
    forge.settings["UPLOADS_REGISTER"] = "hash"

    result = forge.run("stale_direct_uploads")

    assert (result["total_pending_entries"], result["total_deleted_stale_entries"]) == (2, 1)
    assert (forge.errors("redis"), stale.exists(), server.hlen("pending_direct_uploads")) == ([], False, 1)
