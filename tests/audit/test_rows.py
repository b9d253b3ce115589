"""What one statement deletes is in the audit, all of it and nothing else, or nothing is deleted."""

from contextlib import contextmanager
from datetime import timedelta

import peewee as pw
import pytest
from hypothesis import given
from hypothesis import settings as worlds
from hypothesis import strategies as some

from forgekeeper.audit.deletions import Audit, Deletion
from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.storage.settled import SettledUpload
from models import BulkImport, BulkImportEntity, BulkImportTracker, JobArtifact, ProjectStatistics, UserStatus
from tests.harness.changing import ENTITIES, IMPORTS, cleanup_stale
from tests.harness.performing import ended, recorded, runner_of
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from workers.expired_job_artifacts import FLAG, buckets, delete_artifact_bucket
from workers.prune import prune
from workers.stale_imports import stale_imports
from workers.user_status_cleanup import user_status_cleanup

pytestmark = pytest.mark.usefixtures("database")

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
EMPTIED = (UserStatus, JobArtifact, ProjectStatistics, BulkImport, BulkImportEntity, BulkImportTracker, Quarantined)
WORLDS = worlds(max_examples=examples(200))
# Of each: due or not, in which project, locked by somebody or not, bad or not.
RECORDS = some.lists(
    some.tuples(some.booleans(), some.integers(1, 4), some.sampled_from(["", "", "", "locked", "bad"])), max_size=130
)
RAISE_FOR_BAD = """
    create or replace function refuse_bad() returns trigger language plpgsql as $$
    begin
        if {bad} then raise check_violation using message = 'it is bad'; end if;
        return {row};
    end $$;
    create trigger refuse_bad before {event} on {table} for each row execute function refuse_bad()
"""


@contextmanager
def bad(table, condition, event="delete"):
    """Let rows be bad: to delete or update them raises."""
    row = "old" if event == "delete" else "new"
    database.execute_sql(RAISE_FOR_BAD.format(bad=condition, row=row, event=event, table=table))
    try:
        yield
    finally:
        database.execute_sql(f"drop trigger refuse_bad on {table}")


@contextmanager
def locked(other, table, key, ids):
    """Let somebody have those rows locked."""
    other.execute(f"select from {table} where {key} = any(%s) for update", (list(ids),))
    try:
        yield
    finally:
        other.connection.rollback()


@pytest.fixture
def emptied():
    """Empty the tables, for another world."""

    def empty():
        database.execute_sql(f"truncate {', '.join(each._meta.table_name for each in EMPTIED)}")
        client.flushdb()

    return empty


def lines(record, since=0):
    return list(Deletion.select().where(Deletion.record == record, Deletion.id > since).order_by(Deletion.id))


def last():
    return Deletion.select(pw.fn.coalesce(pw.fn.max(Deletion.id), 0)).scalar()


def audited(record, since=0):
    return sorted(number for line in lines(record, since) for number in line.ids)


def each_column(line):
    """The columns of a line, a value for each record."""
    return {key: value if isinstance(value, list) else [value] * len(line.ids) for key, value in line.detail.items()}


# All of it and nothing else


def test_in_any_world_the_statuses_that_are_gone_are_those_in_the_audit(emptied, settings, other):
    @WORLDS
    @given(RECORDS)
    def hold(world):
        emptied()
        since, when = last(), now()
        rows = [
            {"user_id": number, "message": fate, "clear_status_at": when - HOUR if due else when + HOUR}
            for number, (due, _, fate) in enumerate(world, 1)
        ]
        if rows:
            UserStatus.insert_many(rows).execute()
        held = [row["user_id"] for row in rows if row["message"] == "locked"]
        with bad("user_statuses", "old.message = 'bad'"), locked(other, "user_statuses", "user_id", held):
            recorded(user_status_cleanup, settings)
        left = {row.user_id for row in UserStatus.select()}
        assert audited("user_status", since) == [row["user_id"] for row in rows if row["user_id"] not in left]

    hold()


def test_in_any_world_the_artifacts_that_are_gone_are_those_in_the_audit(emptied, settings, other):
    FeatureFlag.turn(FLAG, on=True)

    @WORLDS
    @given(RECORDS)
    def hold(world):
        emptied()
        since, when = last(), now()
        ProjectStatistics.insert_many([{"project_id": project} for project in range(1, 5)]).execute()
        rows = [
            {
                "id": number, "project_id": project, "job_id": number, "file_type": 1 + number % 3,
                "file_final_path": f"p/{number}", "file": fate or None, "size": number,
                "expire_at": when - HOUR if due else when + HOUR, "locked": 0,
            }
            for number, (due, project, fate) in enumerate(world, 1)
        ]  # fmt: skip
        if rows:
            JobArtifact.insert_many(rows).execute()
        held = [row["id"] for row in rows if row["file"] == "locked"]
        with bad("ci_job_artifacts", "old.file = 'bad'"), locked(other, "ci_job_artifacts", "id", held):
            destroy_all(settings)
        left = {row.id for row in JobArtifact.select(JobArtifact.id)}
        assert audited("expired_artifact", since) == [row["id"] for row in rows if row["id"] not in left]

    hold()


def test_in_any_world_the_imports_that_were_given_up_are_those_in_the_audit(emptied, settings, other):
    @WORLDS
    @given(RECORDS)
    def hold(world):
        emptied()
        since, when = last(), now()
        for model, more in ((BulkImport, {"user_id": 1}), (BulkImportEntity, FACTS)):
            rows = [
                {**more, "id": number, "has_failures": fate == "bad", "status": (number + project) % 2}
                | {"updated_at": when - 2 * DAY if due else when}
                for number, (due, project, fate) in enumerate(world, 1)
            ]
            if rows:
                model.insert_many(rows).execute()
        held = [number for number, (_, _, fate) in enumerate(world, 1) if fate == "locked"]
        with (
            bad("bulk_imports", "new.has_failures", "update"),
            locked(other, "bulk_imports", "id", held),
        ):
            recorded(stale_imports, settings)
        for model, record in ((BulkImport, "bulk_import"), (BulkImportEntity, "entity")):
            given_up = sorted(row.id for row in model.select(model.id).where(model.status == 3))
            assert audited(record, since) == given_up

    hold()


FACTS = {"bulk_import_id": 1, "source_full_path": "a/b", "destination_name": "b", "destination_namespace": "c"}


def destroy_all(settings):
    buckets.tidy(client, 5, silent_for=DAY)
    with runner_of(settings) as runner:
        for number in range(5):
            ended(runner.child(delete_artifact_bucket, f"delete_artifact_bucket:{number}", run=41))


# What is said of each


@pytest.fixture
def artifacts():
    """A hundred and twenty expired artifacts of two projects."""
    FeatureFlag.turn(FLAG, on=True)
    ProjectStatistics.insert_many([{"project_id": project} for project in (1, 2)]).execute()
    for number in range(1, 121):
        JobArtifact.create(
            id=number, project_id=1 + number % 2, job_id=number * 7, partition_id=100 + number % 3, file_type=1,
            file_store=2, file=None if number % 5 else "x.zip", file_final_path=f"p/{number}",
            size=None if number % 4 == 0 else number, expire_at=now() - number * HOUR, locked=0,
        )  # fmt: skip
    return list(JobArtifact.select().order_by(JobArtifact.id).dicts())


NAMES = {"file_final_path": "path", "size": "bytes", "expire_at": "due"}


def test_an_artifact_can_be_inserted_back_from_its_line(artifacts, settings):
    destroy_all(settings)

    text = {name: f"'{NAMES.get(name, name)}'" for name in artifacts[0] if name not in ("id", "locked")}
    back = {}
    for line in lines("expired_artifact"):
        columns = each_column(line)
        for place, number in enumerate(line.ids):
            back[number] = {name: columns[key.strip("'")][place] for name, key in text.items()}
    JobArtifact.insert_many([{"id": number, "locked": 0, **row} for number, row in back.items()]).execute()

    assert list(JobArtifact.select().order_by(JobArtifact.id).dicts()) == artifacts


def test_a_row_is_a_chunk_and_not_a_record(settings):
    UserStatus.insert_many([{"user_id": number, "clear_status_at": now() - HOUR} for number in range(1, 251)]).execute()

    recorded(user_status_cleanup, settings)

    assert [len(line.ids) for line in lines("user_status")] == [100, 100, 50]


def test_an_entity_is_said_with_its_import_and_how_many_trackers_went(settings):
    entity = BulkImportEntity.create(**FACTS | {"bulk_import_id": 9}, updated_at=now() - 2 * DAY)
    for status in (0, 1, 2, 3):
        BulkImportTracker.create(bulk_import_entity_id=entity.id, relation="r", status=status)

    recorded(stale_imports, settings)

    (line,) = lines("entity")
    assert (line.ids, line.detail) == (
        [entity.id],
        {"bulk_import_id": 9, "source_full_path": "a/b", "trackers": 3},
    )


def test_what_prune_removes_is_said_by_id(settings):
    old = [JobRun.create(batch="a", state="failed", finished_at=now() - 40 * DAY).id for _ in range(3)]
    Process.enrol(kind="worker", host="h", pid=1, version="1", dead_after=-2 * DAY, facts={})
    gone = {process.id for process in Process.select()}

    recorded(prune, settings)

    # The newest of each batch stays.
    assert (audited("job_run"), audited("process")) == (old[:-1], sorted(gone))


# Both or neither


@pytest.fixture
def refusing(database):
    """An audit that takes no lines."""
    database.execute_sql("alter table audit_deletions add constraint refusing check (batch = 'nobody') not valid")
    yield
    database.execute_sql("alter table audit_deletions drop constraint refusing")


@pytest.mark.usefixtures("refusing")
def test_where_no_line_can_be_written_no_status_goes_and_the_run_says_so(settings):
    UserStatus.create(user_id=1, clear_status_at=now() - HOUR)

    recorded(user_status_cleanup, settings)

    assert (UserStatus.select().count(), lines("user_status")) == (1, [])
    assert "refusing" in Quarantined.get().error


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("kind", [IMPORTS, ENTITIES], ids=["imports", "entities"])
def test_where_no_line_can_be_written_no_import_is_given_up(kind):
    more = {"user_id": 1} if kind is IMPORTS else FACTS
    stale = kind.model.create(**more, updated_at=now() - 2 * DAY)

    with pytest.raises(pw.IntegrityError, match="refusing"):
        cleanup_stale(kind, now(), [stale.id], audit=Audit("a", on=True))

    assert kind.model.get_by_id(stale.id).status == 0


# Off


@pytest.mark.parametrize("options", [{"audit": "off"}, {"audit": "people"}, {"audit_user_status_cleanup": "off"}])
def test_where_it_is_off_rows_go_without_a_line(settings, options):
    UserStatus.create(user_id=1, clear_status_at=now() - HOUR)

    recorded(user_status_cleanup, settings_with(**settings.model_dump(exclude_unset=True) | options))

    assert (UserStatus.select().count(), Deletion.select().count()) == (0, 0)


def test_of_what_has_no_ids_prune_says_how_many_went(settings):
    for days in (29, 31, 32):
        SettledUpload.create(location="lfs", path=f"{days}", reaped=True, settled_at=now() - days * DAY)

    recorded(prune, settings)

    assert [(line.ids, line.detail) for line in lines("settled_upload")] == [([], {"count": 2})]
