"""An index that misses existing rows blocks the batches that would take an empty answer for a proof."""

import os
from functools import partial
from typing import NamedTuple

import peewee as pw
import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.connections import client
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets import stores
from models import JobArtifact
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import uploads

STATUSES, STATUS_INDEX = "user_status_cleanup", "user_statuses_clear_status_at"
REFS = "git_ref_cleanup"
READ_ARTIFACTS = "expired_job_artifacts, delete_objects, stale_direct_uploads"
OLD_VERSION = "update pg_database set datcollversion = 'old' where datname = current_database()"
OLD_COLLATION = "update pg_collation set collversion = 'old' where collname = '{}'"
SET_STATE = f"update pg_index set {{}} where indexrelid = '{STATUS_INDEX}'::regclass"
INDEX = "ci_job_artifacts_file_final_path"
# Hyphens count for nothing, as in the C library's older rules.
SORT_BY_OLDER_RULES = f"""
    create function compare_by_older_rules(text, text) returns integer language sql immutable
        return bttextcmp(replace($1, '-', ''), replace($2, '-', ''));
    create operator class older_rules for type text using btree as operator 1 <, operator 2 <=, operator 3 =,
        operator 4 >=, operator 5 >, function 1 compare_by_older_rules(text, text);
    update pg_index set indclass = (select oid::text::oidvector from pg_opclass where opcname = 'older_rules')
        where indexrelid = '{INDEX}'::regclass;
    reindex index {INDEX};
    update pg_index set indclass = '3126' where indexrelid = '{INDEX}'::regclass
"""
SORT_BACKWARDS = f"update pg_index set indoption = '1' where indexrelid = '{INDEX}'::regclass"
REPAIR = f"""
    update pg_index set indoption = '0' where indexrelid = '{INDEX}'::regclass;
    reindex index {INDEX};
    drop function if exists compare_by_older_rules cascade
"""
ADD_ARTIFACTS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path)
    select 1, n, 1, 'live/' || case when mod(n, 20) = 0 then '-' else '' end || lpad(n::text, 4, '0')
    from generate_series(1, 2000) as n;
    analyze ci_job_artifacts
"""


class Reason(NamedTuple):
    """What makes lookups miss rows; `check` says *sentence* of the batches in *of*, which are blocked if it does so."""

    change: str
    of: str
    sentence: str
    blocks: bool = True


REASONS = {
    "another version of the database's collation": Reason(
        OLD_VERSION, ", ".join(BATCHES), 'is sorted by version old of collation "default", but the server'
    ),
    "another version of a column's collation, in a partition below a view": Reason(
        """
        alter table ci_job_artifacts rename to plain;
        create table whole (like plain) partition by list (partition_id);
        create table part partition of whole default;
        create index part_paths on part (file_final_path collate ucs_basic);
        create view ci_job_artifacts as select * from whole;
        """
        + OLD_COLLATION.format("ucs_basic"),
        READ_ARTIFACTS,
        "index part_paths of part is sorted by version old of collation ucs_basic, but the server",
    ),
    "another version of a partition key's collation": Reason(
        """
        alter table projects rename to plain;
        create table projects (like plain) partition by list (disk_path collate ucs_basic);
        """
        + OLD_COLLATION.format("ucs_basic"),
        REFS,
        "projects is partitioned by version old of collation ucs_basic",
    ),
    "a collation of which the server has no version": Reason(
        'create index on user_statuses (emoji collate "C");' + OLD_COLLATION.format("C"),
        STATUSES,
        "so `refresh collation version` fails",
    ),
    "an index that is not kept up to date": Reason(
        SET_STATE.format("indisready = false"),
        STATUSES,
        f"index {STATUS_INDEX} of user_statuses is used but not kept up to date",
    ),
    "an index that is not valid": Reason(
        SET_STATE.format("indisvalid = false, indisready = false"),
        STATUSES,
        f"index {STATUS_INDEX} of user_statuses is not valid",
        blocks=False,
    ),
    "an unlogged table": Reason(
        "alter table user_statuses set unlogged", STATUSES, "table user_statuses is unlogged, so a crash"
    ),
    "damaged pages that count as empty": Reason(
        "set local zero_damaged_pages = on", ", ".join(BATCHES), "zero_damaged_pages is on, so rows of damaged pages"
    ),
    "triggers and foreign keys that are off": Reason(
        "set local session_replication_role = replica", ", ".join(BATCHES), "session_replication_role is replica, which"
    ),
    "row security that hides rows from the owner of a view": Reason(
        """
        create role another;
        create role keeper bypassrls;
        alter table user_statuses rename to statuses;
        alter table statuses enable row level security, force row level security;
        grant select on statuses to another;
        create view user_statuses as select * from statuses;
        alter view user_statuses owner to another;
        grant usage on schema public, forgekeeper to keeper;
        grant all on all tables in schema public, forgekeeper to keeper;
        set local role keeper
        """,
        STATUSES,
        "row security hides rows of statuses from another: `alter role another bypassrls`",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_to_miss_rows_is_named_and_blocks_the_batches_that_look_there(change, found, blocked, name):
    reason = REASONS[name]

    change(reason.change)

    said = [one for one in found("contract") if reason.sentence in one.message]
    assert [(one.level, one.message.split(": ")[0]) for one in said] == [
        ("error" if reason.blocks else "warning", reason.of)
    ]
    sentences = blocked()
    assert set(sentences) == (set(reason.of.split(", ")) if reason.blocks else set())
    assert all(code == "schema" and reason.sentence in sentence for code, sentence in sentences.values())


@pytest.fixture
def live(database, store):
    """Two thousand live artifacts; a tenth of them has an object in the store, two days old."""
    database.execute_sql(ADD_ARTIFACTS)
    # The table is small, and some versions of PostgreSQL would read all of it.
    database.execute_sql(f"set enable_seqscan = off; alter database {database.database} set enable_seqscan = off")
    paths = sorted(path for (path,) in JobArtifact.select(JobArtifact.file_final_path).tuples())[::10]
    (store / "live").mkdir()
    for path in paths:
        (store / path).touch()
        os.utime(store / path, (0, 0))
    yield paths
    database.execute_sql(f"alter database {database.database} reset enable_seqscan; {REPAIR}")
    database.execute_sql(f"alter database {database.database} refresh collation version")


@pytest.fixture
def reconcile(main, live):
    """Register the objects in the folder that nothing names."""
    return partial(main, "uploads", "reconcile", "artifacts", "--prefix", "live", "--yes")


def test_reconcile_registers_no_live_object_that_an_index_of_another_version_hides(database, live, reconcile):
    database.execute_sql(SORT_BY_OLDER_RULES)
    database.execute_sql(OLD_VERSION)
    assert JobArtifact.named(live) < set(live)

    result = reconcile()

    assert (result.status, "collation version`" in result.complaint) == (3, True)
    assert client.zcard(uploads.keys.pending) == 0


def test_a_damaged_index_is_noticed_by_a_sample_whatever_its_version(database, live, main, reconcile, store):
    path = live[0]
    DeletedObject.create(store_dir="live", file=path.removeprefix("live/"))
    database.execute_sql(SORT_BACKWARDS)
    assert JobArtifact.named(live) < set(live)

    run, registered = main("run", "delete_objects", "--json"), reconcile()

    sentence = "lookups miss existing rows of ci_job_artifacts"
    assert (run.status, run.json["blocked"].startswith(sentence), (store / path).exists()) == (3, True, True)
    assert (registered.status, sentence in registered.complaint) == (3, True)
    assert client.zcard(uploads.keys.pending) == 0
    assert sentence in str(main("check", "--json").findings("contract"))


def test_a_lookup_that_takes_too_long_is_an_error_and_no_answer(database, other):
    other.execute("lock table ci_job_artifacts in access exclusive mode")
    database.execute_sql("set statement_timeout = 50")

    with pytest.raises(pw.OperationalError, match="statement timeout"):
        stores.find_kept_paths(JobArtifact, "artifacts", ["live"], settings_with())

    database.execute_sql("reset statement_timeout")
