"""A batch that deletes the object of each stale upload names a register, and nothing else."""

from datetime import timedelta

import pytest

from forgekeeper import Children, NamedBy, Objects, Producer, Queue, Register, Retry, Rows, batch
from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.deletions import Deletion
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.redis_values import KEY_TYPES
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.redis_register import RedisRegister
from forgekeeper.sources.settled import SettledUpload
from models import JobArtifact, PathlessArtifact
from tests.harness.performing import perform, run_as_worker
from tests.harness.settings import settings_with

MINUTE = timedelta(minutes=1)
PACKAGES = Register("new_packages", older_than=2 * MINUTE, retry=Retry(first=MINUTE, attempts=1))
KEYS = RedisRegister(PACKAGES).keys


@pytest.fixture(autouse=True)
def forgotten():
    """Forget after each test what it has declared."""
    known, types = set(BATCHES), dict(KEY_TYPES)
    yield
    for name in BATCHES.keys() - known:
        del BATCHES[name]
    KEY_TYPES.clear()
    KEY_TYPES.update(types)


@pytest.fixture
def packages(database, folder):
    """Three stale uploads and a fresh one, with their objects."""
    client.delete(*KEYS)
    folder.put(*(f"p/{number}" for number in range(4)))
    for number in range(4):
        register(f"p/{number}", age=0 if number == 3 else 121 + number)
    return folder


def register(path, *, age):
    client.zadd(KEYS.pending, {f"packages:{path}": client.time()[0] - age})


def declared(name="stale_packages", answer=None, **facts):
    def function(now):
        return answer or Objects(PACKAGES, unless=NamedBy(JobArtifact))

    function.__name__, function.__doc__ = name, "Delete packages whose upload never completed."
    return batch(cron="off", budget=MINUTE, **facts)(function)


def settings(folder):
    return settings_with(object_stores={"packages": folder.url}, breaker_share=1)


def pending():
    return {member.decode() for member in client.zrange(KEYS.pending, 0, -1)}


def test_a_run_deletes_the_objects_of_stale_uploads_and_their_entries(packages):
    outcome = perform(declared(), settings=settings(packages))

    assert (outcome.pending, outcome.deleted, outcome.timed_out, outcome.failed) == (4, 3, False, 0)
    assert (packages.keys(), pending()) == ({"p/3"}, {"packages:p/3"})


def test_the_document_names_the_fields_of_the_result(packages):
    answer = Objects(PACKAGES, counted={"deleted": "total_deleted", "timed_out": "is_late"})

    outcome = perform(declared(answer=answer), settings=settings(packages))

    assert (outcome.pending, outcome.total_deleted, outcome.is_late, outcome.stopped) == (4, 3, False, "drained")


def test_the_audit_has_each_object_with_its_location_and_its_due_time(packages):
    run_as_worker(declared(), settings(packages))

    (intent,) = Deletion.select().where(Deletion.record == "stale_upload", Deletion.phase == "intent")
    assert (intent.detail["path"], intent.detail["location"]) == (["p/2", "p/1", "p/0"], "packages")


def test_a_failure_waits_for_a_person_after_the_attempts_of_the_register(packages):
    spec, given = declared(), settings(packages)
    client.zadd(KEYS.pending, {"elsewhere:a": 0})

    assert perform(spec, settings=given).failed == 1

    (refused,) = spec.refused
    (entry,) = refused.entries(given, 10)
    assert (refused.kind, entry.key, entry.failures) == ("upload", "elsewhere:a", 1)
    assert (refused.retry([entry.key]), refused.count()) == (1, 0)


def test_a_preview_counts_what_a_run_would_delete(packages):
    (part,) = preview_batch(declared(), settings(packages)).parts

    assert (part.record, part.records, len(pending())) == ("stale_upload", 3, 4)


def test_what_everybody_asks_about_it_follows_from_the_answer(packages):
    spec = declared()

    assert [one.name for one in spec.records] == ["pending_upload", "stale_upload", "failed_upload"]
    assert (spec.sum_backlogs(now()).records, spec.stake(now()).due(10), spec.stake(now()).total(10)) == (3, 3, 4)
    assert (spec.deletes_from, spec.epoch_key, [*spec.misreadings()]) == ("stores", "{new_packages}:epoch", [])
    assert [*spec.tables, *spec.reads] == [DeletedObject, SettledUpload, JobArtifact]
    assert {*spec.known_objects[0]("packages")} == {f"p/{number}" for number in range(4)}
    assert KEY_TYPES[KEYS.pending] == "zset"


def test_the_exporter_reads_it_without_the_database(packages):
    spec = declared(collector="packages")
    (collector,) = spec.collectors.values()

    read = {(one[0], one[2][1:]): one[1] for one in collector.read(settings(packages))}

    assert ([*spec.collectors], collector.database) == (["packages"], False)
    assert read["backlog_records", ("pending_upload",)] == 4
    assert read["backlog_records", ("stale_upload",)] == 3
    assert read["quarantine_records", ("failed_upload",)] == 0


def test_a_producer_uses_the_register_and_the_owner_of_its_batch(packages):
    producer = Producer(declared())

    producer.prepare(client, "packages", "new")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="live")
    with pytest.raises(producer.PathTaken):
        producer.prepare(client, "artifacts", "live")
    with db.atomic():
        assert producer.complete(client, "packages", "new")
    assert (pending() & {"packages:new"}, SettledUpload.find_settled("packages", ["new"], reaped=False)) == (
        set(),
        {"new"},
    )


def test_a_producer_without_a_register_is_a_mistake():
    with pytest.raises(Mistake, match="user_status_cleanup: the batch has to return Objects"):
        Producer(BATCHES["user_status_cleanup"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: Register("New uploads", older_than=MINUTE), "write lower-case letters, digits and _, as in new_uploads"),
        (lambda: Register("new", older_than=timedelta(0)), "older_than has to be whole seconds, at least one"),
        (lambda: Register("new", older_than=MINUTE / 7), "older_than has to be whole seconds, at least one"),
        (lambda: Register("new", older_than=MINUTE, retry=Retry(attempts=0)), "an entry has at least one attempt"),
        (lambda: Objects(PACKAGES, location="a"), "Objects of new_packages: an entry contains .* leave out location="),
        (lambda: Objects(PACKAGES, path=JobArtifact.file), "leave out path="),
        (lambda: Objects(PACKAGES, project=JobArtifact.project_id), "leave out project="),
        (lambda: Objects(PACKAGES, unless=NamedBy(JobArtifact, unsure=PathlessArtifact)), "leave it out"),
        (lambda: Objects(PACKAGES, counted={"gone": "a"}), "counted= lacks 'gone', and has pending, deleted, timed_out"),
        (lambda: Objects(PACKAGES, chunk=0), "a chunk has at least one object"),
        (lambda: Objects(_queue(), path=DeletedObject.file), "name the object of a row with location= and path="),
        (lambda: Objects(_queue(), location="a"), "name the object of a row with location= and path="),
        (lambda: Objects(_queue(), location="a", path=DeletedObject.file, counted={"failed": "a"}), "for a register"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_where_it_is_written(answer, said):
    with pytest.raises(Mistake, match=said):
        answer()


def _queue():
    columns = {"due_at": DeletedObject.pick_up_at, "created_at": DeletedObject.created_at}
    return Queue(DeletedObject, attempts=DeletedObject.attempts, **columns)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: Rows(JobArtifact, since=JobArtifact.expire_at, older_than=MINUTE), "declare a batch for each"),
        (lambda: Children(BATCHES["prune"], []), "declare a batch for each"),
        (lambda: Objects(Register("others", older_than=MINUTE)), "declare a batch for each"),
    ],
    ids=["rows", "children", "another"],
)
def test_a_register_is_the_only_answer_of_its_batch(other, said):
    with pytest.raises(Mistake, match=said):
        declared(answer=[Objects(PACKAGES), other()])


def test_two_batches_with_one_register_are_a_mistake():
    declared()

    with pytest.raises(Mistake, match="the register 'new_packages' belongs to stale_packages"):
        declared("more_packages")


def test_an_outcome_without_a_field_that_is_counted_is_a_mistake():
    outcome = BATCHES["prune"].outcome

    with pytest.raises(Mistake, match="its outcome has no field 'pending'; name a field with counted="):
        declared(outcome=outcome)


def test_a_register_that_the_declaration_does_not_know_is_a_mistake(packages):
    spec = declared(records=[], outcome=BATCHES["prune"].outcome)

    with pytest.raises(Mistake, match="which its declaration lacks: leave records= out"):
        perform(spec, settings=settings(packages))

    assert (len(packages.keys()), len(pending())) == (4, 4)
