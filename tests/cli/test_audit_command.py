"""Who deleted it, when, and why: the audit from the command line."""

from datetime import UTC, datetime, timedelta

import pytest

from forgekeeper.audit import acts
from forgekeeper.audit.deletions import Audit, IntentOutcome
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from models import JobArtifact, ProjectStatistics
from tests.harness.artifacts import buckets
from tests.harness.audited import record_intent
from tests.harness.performing import run_child, runner_of
from tests.harness.thorough import whole_only
from workers.expired_job_artifacts import FLAG, delete_artifact_bucket

pytestmark = pytest.mark.usefixtures("database")

DAY = timedelta(days=1)
EXPIRED = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def objects():
    """What `delete_objects` says of an object."""
    return Audit("delete_objects", on=True, run=900)


@pytest.fixture
def destroyed(settings):
    """An artifact that a child has destroyed; return its number."""
    db.execute_sql("insert into feature_flags values (%s, true)", (FLAG,))
    ProjectStatistics.create(project_id=7, build_artifacts_size=1000)
    artifact = JobArtifact.create(
        project_id=7,
        job_id=3,
        file_type=1,
        file="a.zip",
        file_final_path="a/b/c",
        size=1000,
        expire_at=EXPIRED,
        locked=0,
    )
    buckets.tidy(client, 5, silent_for=DAY)
    with runner_of(settings) as runner:
        for _ in range(5):
            run_child(runner, delete_artifact_bucket, "delete_artifact_bucket:0", run=77)
    return artifact.id


def ask(main, *words):
    result = main("audit", *words)
    assert result.status == 0, result.stderr
    return result.stdout


def test_who_deleted_an_artifact_when_and_why(main, destroyed):
    said = ask(main, "--what", f"artifact:{destroyed}")

    assert f"Artifact {destroyed} was destroyed at {now():%Y-%m-%d}" in said
    assert "by run 77 of expired_job_artifacts (child delete_artifact_bucket:0)" in said
    assert "because it had expired at 2026-03-04 05:06:07, was unlocked and was not a trace" in said
    assert all(fact in said for fact in ("project_id=7", "job_id=3", "bytes=1000", "path=a/b/c", "file=a.zip"))


@whole_only
def test_what_has_become_of_an_artifacts_object_is_said_with_it(main, destroyed, objects):
    before = ask(main, "--what", f"artifact:{destroyed}")
    (intent,) = record_intent(objects, "deleted_object", ids=[55], names=["a/b/c"], path="a/b/c")
    meanwhile = ask(main, "--what", f"artifact:{destroyed}")
    objects.record_outcomes(
        "deleted_object", [IntentOutcome(intent, [55], ["a/b/c"], {"path": "a/b/c", "state": "deleted"})]
    )
    after = ask(main, "--what", f"artifact:{destroyed}")

    assert "The audit has no entry about its object a/b/c" in before
    assert "Its object a/b/c was about to be deleted" in meanwhile
    assert "the result is not known yet" in meanwhile
    assert "Its object a/b/c was deleted at" in after
    assert "by run 900 of delete_objects" in after


def test_a_ref_is_found_by_its_project_and_name_with_what_it_was_and_how_to_restore_it(main):
    audit = Audit("git_ref_cleanup", on=True, run=4, child="clean_project_refs:7")
    for project, oid in ((7, "a" * 40), (8, "b" * 40)):
        facts = {"ref": "refs/heads/x:y", "project_id": project, "oid": oid, "due": EXPIRED}
        (intent,) = record_intent(audit, "git_ref_deletion", ids=[project], names=["refs/heads/x:y"], **facts)
        ended = IntentOutcome(intent, [project], ["refs/heads/x:y"], facts | {"state": "deleted"})
        audit.record_outcomes("git_ref_deletion", [ended])

    said = ask(main, "--what", "ref:7:refs/heads/x:y")

    assert "a" * 40 in said
    assert "b" * 40 not in said
    assert "its project requested the deletion at 2026-03-04 05:06:07" in said
    assert "`forgekeeper refs restore 7`" in said


def test_what_was_deleted_of_a_project_is_listed_and_of_no_other(main, destroyed):
    listed = main("audit", "--project", "7", "--json").json
    shown, since, other = (ask(main, "--project", *words) for words in (["7"], ["7", "--since", "1h"], ["8"]))

    (deletion,) = listed["deletions"]
    assert (deletion["id"], deletion["path"], deletion["run"]) == (destroyed, "a/b/c", 77)
    assert listed["sentences"] == ["expired_job_artifacts: 1 expired_artifact of project 7 deleted."]
    assert f"expired_artifact {destroyed} a/b/c" in shown == since
    assert "The audit has no deletions in project 8" in other


@whole_only
@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("kept", "was kept"),
        ("moved", "had been changed"),
        ("missing", "no longer existed"),
        ("failed", "the deletion failed"),
    ],
)
def test_what_was_not_deleted_after_all_is_not_said_to_be(main, objects, state, sentence):
    (intent,) = record_intent(objects, "deleted_object", ids=[55, 56], names=["x", "y"], path=["x", "y"])
    objects.record_outcomes("deleted_object", [IntentOutcome(intent, [55], ["x"], {"path": "x", "state": state})])

    assert sentence in ask(main, "--what", "path:x")
    assert "was kept" in ask(main, "--what", "path:y")


def test_where_there_is_nothing_it_is_said_how_far_back_the_audit_reaches(main, objects):
    empty = ask(main, "--what", "artifact:1")
    objects.record_deleted("deleted_object", ids=[1])
    some = ask(main, "--what", "artifact:1")

    assert empty == "The audit has no entry about artifact 1.\nIt has no deletions yet.\n"
    assert f"It reaches back to {now():%Y-%m-%d}" in some


@pytest.mark.parametrize("what", ["artefact:1", "artifact", "artifact:", "x"])
def test_what_the_audit_does_not_know_is_refused_with_what_it_does(main, what):
    result = main("audit", "--what", what)

    assert result.status == 2
    assert "artifact:ID" in result.complaint
    assert "status:USER, ref:PROJECT:REF" in result.complaint
    assert "path:[LOCATION:]PATH" in result.complaint


def test_a_run_is_added_up_with_what_has_become_of_its_records(main, objects):
    (intent,) = record_intent(objects, "deleted_object", ids=[1, 2, 3], names=["a", "b", "c"], path=["a", "b", "c"])
    states = {"state": ["deleted", "kept", "deleted"]}
    objects.record_outcomes("deleted_object", [IntentOutcome(intent, [1, 2, 3], ["a", "b", "c"], states)])
    record_intent(objects, "deleted_object", ids=[4], names=["d"], path="d")
    objects.record_deleted("other", ids=[], count=12)

    totals = main("audit", "--run", "900", "--json").json["totals"]

    assert {(one["record"], one["state"]): one["records"] for one in totals} == {
        ("deleted_object", "deleted"): 2,
        ("deleted_object", "kept"): 1,
        ("deleted_object", "not known yet"): 1,
        ("other", "deleted"): 12,
    }


def test_acts_are_found_by_who_did_them(main, objects):
    objects.record_deleted("deleted_object", ids=[1])
    for actor, act in (("erika", "pause"), ("max", "resume")):
        with acts.recording_acts(actor=actor, on=True):
            acts.record_act(act, "prune")

    answer = main("audit", "--who", "erika", "--json").json

    assert ([act["act"] for act in answer["acts"]], answer["deletions"]) == (["pause"], [])


@pytest.mark.parametrize(("since", "found"), [("1h", 1), ("2026-01-01", 1), ("9w", 1), ("2100-01-01T00:00", 0)])
def test_since_takes_times_and_ages(main, objects, since, found):
    objects.record_deleted("deleted_object", ids=[1])

    assert len(main("audit", "--since", since, "--json").json["deletions"]) == found
