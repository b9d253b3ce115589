"""Artifacts that were destroyed wrongly: their objects are held back, and their rows inserted back."""

from datetime import timedelta

import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Audit
from forgekeeper.database import database, now
from forgekeeper.storage.outbox import DeletedObject
from models import CLASSES, JobArtifact, ProjectStatistics
from tests.harness.artifacts import destroy_chunk
from tests.harness.audited import interrupted_at
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.delete_objects import delete_objects

RUN = 17
DAY = timedelta(days=1)

pytestmark = pytest.mark.usefixtures("database", "store")


def artifact(store, path, *, project=7, **facts):
    """Make an expired artifact with its object."""
    if path is not None:
        (store / path).parent.mkdir(parents=True, exist_ok=True)
        (store / path).write_bytes(b"")
    expired = now() - timedelta(days=3)
    facts = {"job_id": 3, "file_type": 2, "size": 10, "locked": 0, "expire_at": expired} | facts
    return JobArtifact.create(project_id=project, file_final_path=path, **facts).id


def destroy(*, run=RUN, grace=DAY):
    """Destroy all that has expired, as the batch does."""
    for number in range(CLASSES):
        audit = Audit("expired_job_artifacts", on=True, run=run)
        destroy_chunk(number, now(), limit=1_000, grace=grace, audit=audit)


def rows():
    return database.execute_sql("select * from ci_job_artifacts order by id").fetchall()


def a_day_later():
    """Let the grace pass, and the batch delete what is due."""
    later = "update ci_deleted_objects set pick_up_at = pick_up_at - interval '25 hours'"
    database.execute_sql(later)
    return perform(delete_objects, settings=settings_with())


def insert_back(result):
    for statement in result.json["statements"]:
        database.execute_sql(statement.replace("%", "%%"))


@pytest.mark.parametrize("words", [["--project", "7"], ["--run", str(RUN)]])
def test_rows_that_are_inserted_back_are_the_old_ones(main, store, words):
    artifact(store, "@final/a'b%s\\", size=None)
    artifact(store, "b", file_store=2, file="b.zip", partition_id=101, updated_at=now() - DAY)
    ProjectStatistics.create(project_id=7, build_artifacts_size=100)
    before = rows()
    destroy()
    assert rows() == []

    result = main("objects", "hold", *words, "--json")
    for _twice in range(2):
        insert_back(result)
        assert rows() == before
        assert ProjectStatistics.get().build_artifacts_size == 100


def test_only_what_the_run_has_destroyed_is_held_and_what_is_gone_is_said_to_be_lost(main, store):
    artifact(store, "earlier")
    destroy(run=RUN - 1)
    artifact(store, "gone")
    destroy(grace=timedelta(0))
    perform(delete_objects, settings=settings_with())
    artifact(store, "a/b [1]")
    destroy()

    found = main("objects", "hold", "--run", str(RUN), "--json").json

    assert [one["file_final_path"] for one in found["artifacts"]] == ["a/b [1]"]
    assert (found["held"], found["lost"], main("objects", "held", "--json").json["held"]) == (1, 1, 1)
    assert "a/b [1]" in main("objects").stdout


@pytest.mark.parametrize("words", [["--project", "7"], ["--run", str(RUN)], ["--all"]])
def test_what_is_let_go_is_deleted_a_grace_later(main, store, words):
    artifact(store, "a")
    destroy()
    main("objects", "hold", "--project", "7")

    result = main("objects", "unhold", *words, OBJECT_GRACE="86400")

    assert result.stdout == "1 are held back no longer\n"
    assert perform(delete_objects, settings=settings_with()).deleted == 0
    assert a_day_later().deleted == 1


@pytest.mark.parametrize(("failpoint", "too_late"), [("claimed", 0), ("deleted", 1)])
def test_an_object_held_after_it_was_claimed_stays_unless_a_run_is_at_it(main, store, failpoint, too_late):
    artifact(store, "a")
    destroy(grace=timedelta(0))
    with interrupted_at(f"delete_objects.{failpoint}"):
        perform(delete_objects, settings=settings_with())

    assert main("objects", "hold", "--project", "7", "--json").json["too_late"] == too_late
    assert a_day_later().deleted == 0
    assert (store / "a").exists() != bool(too_late)


def test_held_objects_stay_and_all_others_go(main, store):
    artifact(store, "mine", project=7)
    artifact(store, "others", project=8)
    destroy()

    main("objects", "hold", "--project", "7")

    assert a_day_later().deleted == 1
    assert (store / "mine").exists()
    assert not (store / "others").exists()


def test_to_hold_and_to_let_go_are_acts_of_a_person(main, store):
    artifact(store, "a")
    destroy()
    main("objects", "hold", "--project", "7")
    main("objects", "unhold", "--run", str(RUN))

    acts = [(act.act, act.what, act.after) for act in Act.select().order_by(Act.id)]
    (number,) = [row.id for row in DeletedObject.select()]
    assert acts == [
        ("objects hold", "project:7", {"count": 1, "first": [number]}),
        ("objects unhold", f"run:{RUN}", {"let_go": 1}),
    ]
