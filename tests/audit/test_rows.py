"""What one statement deletes is in the audit, all of it and nothing else, or nothing is deleted."""

from datetime import timedelta

import peewee as pw
import pytest
from hypothesis import given
from hypothesis import settings as worlds
from hypothesis import strategies as some

from forgekeeper.audit.deletions import Audit, Deletion
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database, now
from forgekeeper.sources.settled import SettledUpload
from models import BulkImportEntity, BulkImportTracker, UserStatus
from tests.harness.bulk_imports import ENTITIES, IMPORTS, cleanup_stale
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with
from tests.harness.tables import before_each
from tests.harness.thorough import examples
from workers.prune import prune
from workers.stale_imports import stale_imports
from workers.user_status_cleanup import user_status_cleanup

pytestmark = pytest.mark.usefixtures("database")

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FACTS = {"bulk_import_id": 1, "source_full_path": "a/b", "destination_name": "b", "destination_namespace": "c"}
# Of each: due or not, locked by somebody or not, bad or not: to delete it raises.
RECORDS = some.lists(some.tuples(some.booleans(), some.sampled_from(["", "", "", "locked", "bad"])), max_size=130)
REFUSE_BAD = "if old.message = 'bad' then raise check_violation using message = 'it is bad'; end if"


def lines(record, since=0):
    return list(Deletion.select().where(Deletion.record == record, Deletion.id > since).order_by(Deletion.id))


def last():
    return Deletion.select(pw.fn.coalesce(pw.fn.max(Deletion.id), 0)).scalar()


def audited(record, since=0):
    return sorted(number for line in lines(record, since) for number in line.ids)


# All of it and nothing else


@pytest.fixture
def refused(database):
    """A forge that lets no bad status go."""
    with before_each("delete", "user_statuses", REFUSE_BAD):
        yield


@pytest.mark.usefixtures("refused")
def test_in_any_world_the_statuses_that_are_gone_are_those_in_the_audit(settings, other):
    @worlds(max_examples=examples(200))
    @given(RECORDS)
    def hold(world):
        database.execute_sql("truncate user_statuses, quarantine")
        since, when = last(), now()
        rows = [
            {"user_id": number, "message": fate, "clear_status_at": when - HOUR if due else when + HOUR}
            for number, (due, fate) in enumerate(world, 1)
        ]
        if rows:
            UserStatus.insert_many(rows).execute()
        other.execute("select from user_statuses where message = 'locked' for update")
        run_as_worker(user_status_cleanup, settings)
        other.connection.rollback()
        left = {row.user_id for row in UserStatus.select()}
        assert audited("user_status", since) == [row["user_id"] for row in rows if row["user_id"] not in left]

    hold()


# What is said of each


def test_an_entity_is_said_with_its_import_and_how_many_trackers_went(settings):
    entity = BulkImportEntity.create(**FACTS | {"bulk_import_id": 9}, updated_at=now() - 2 * DAY)
    for status in (0, 1, 2, 3):
        BulkImportTracker.create(bulk_import_entity_id=entity.id, relation="r", status=status)

    run_as_worker(stale_imports, settings)

    (line,) = lines("entity")
    assert (line.ids, line.detail) == (
        [entity.id],
        {"bulk_import_id": 9, "source_full_path": "a/b", "trackers": 3},
    )


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

    run_as_worker(user_status_cleanup, settings)

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

    run_as_worker(user_status_cleanup, settings_with(**settings.model_dump(exclude_unset=True) | options))

    assert (UserStatus.select().count(), Deletion.select().count()) == (0, 0)


def test_of_what_has_no_ids_prune_says_how_many_went(settings):
    for days in (29, 31, 32):
        SettledUpload.create(location="lfs", path=f"{days}", reaped=True, settled_at=now() - days * DAY)

    run_as_worker(prune, settings)

    assert [(line.ids, line.detail) for line in lines("settled_upload")] == [([], {"count": 2})]
