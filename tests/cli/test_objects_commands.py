"""`buckets`, and objects that nobody answers for: `uploads`."""

import json
import os
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from forgekeeper import NamedBy, Objects, Register, batch
from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.connections import client
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.entries import BeingDeleted
from forgekeeper.sources.register.redis_register import RedisRegister
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import sentinel
from models import JobArtifact
from tests.harness.artifacts import buckets
from tests.harness.stale_uploads import uploads
from tests.harness.thorough import whole_only

DAY = timedelta(days=1)
STALE = timedelta(hours=4)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def reconcile(main, store):
    return partial(main, "uploads", "reconcile", "artifacts", "--prefix", "")


@pytest.fixture
def orphans(reconcile):
    """Ask which objects nobody answers for."""
    return lambda: reconcile("--json").json["orphans"]


def put(store, *paths, age=2 * DAY):
    changed = (datetime.now(UTC) - age).timestamp()
    for path in paths:
        file = store / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        os.utime(file, (changed, changed))


def register(*members, age=STALE):
    client.zadd(uploads.keys.pending, dict.fromkeys(members, client.time()[0] - age.total_seconds()))


def record(path):
    store_dir, _, file = path.rpartition("/")
    DeletedObject.create(store_dir=store_dir, file=file)


def own(*paths):
    """Let a live artifact name each of *paths*."""
    for path in paths:
        JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)


def stock(store, *orphans):
    """Put *orphans* between objects that artifacts name, ten for each: what a run of years has left behind."""
    named = [f"named/{number}" for number in range(10 * len(orphans))]
    put(store, *named, *orphans)
    own(*named)


def time_passes(duration):
    """Let *duration* pass for what lies in the register."""
    for key in (uploads.keys.pending, uploads.keys.deleting, uploads.keys.adopted):
        for member, score in client.zrange(key, 0, -1, withscores=True):
            client.zadd(key, {member: score - duration.total_seconds()})


def members(key):
    return {member.decode() for member in client.zrange(key, 0, -1)}


def test_buckets_shows_the_free_ones_and_who_has_the_others(main):
    buckets.tidy(client, 5, silent_for=timedelta(minutes=10))
    bucket = buckets.claim(client, 5)

    answer = main("buckets", "--json").json

    (held,) = answer["occupied"]
    assert (held["number"], held["token"]) == (bucket.number, bucket.token)
    assert sorted([held["number"], *answer["available"]]) == [0, 1, 2, 3, 4]


# What is an orphan


def test_objects_that_nothing_names_are_shown_and_nothing_is_changed(reconcile, store):
    put(store, "a/1", "a/2", "b")

    answer = reconcile("--json").json

    assert sorted(answer["orphans"]) == ["a/1", "a/2", "b"]
    assert (answer["examined"], answer["named"], answer["registered"], answer["due"]) == (3, 0, 0, None)
    assert members(uploads.keys.pending) == set()


def test_objects_younger_than_a_day_and_the_sentinel_are_none(orphans, store):
    put(store, "young", age=DAY - timedelta(minutes=1))
    put(store, "old", age=DAY + timedelta(minutes=1))
    os.utime(store / sentinel.SENTINEL_NAME, (0, 0))

    assert orphans() == ["old"]


@whole_only
@pytest.mark.parametrize(
    "name",
    [
        own,
        record,
        lambda path: register(f"artifacts:{path}"),
        lambda path: SettledUpload.create(location="artifacts", path=path, reaped=False),
    ],
    ids=["an artifact", "the outbox", "a pending upload", "a completed upload"],
)
@pytest.mark.parametrize("path", ["a/named", "named"])
def test_what_something_names_is_none(orphans, store, path, name):
    put(store, path, "other/orphan")
    name(path)

    assert orphans() == ["other/orphan"]


def test_an_object_in_the_local_store_that_an_artifact_names_is_none(main, store):
    put(store, "a/named", "orphan")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_store=1, file_final_path="a/named")

    answer = main(
        *("uploads", "reconcile", "artifacts_local", "--prefix", "", "--json"),
        OBJECT_STORES=json.dumps({"artifacts_local": store.as_uri()}),
    )

    assert (answer.json["named"], answer.json["orphans"]) == (1, ["orphan"])


# What is registered


@pytest.mark.parametrize(
    ("named", "because"),
    [
        (0, "this database names none of the 3 objects"),
        (9, "3 of 12 objects are orphaned, more than 10%"),
    ],
)
def test_too_many_unnamed_objects_are_registered_only_by_their_number(reconcile, store, named, because):
    put(store, *"abc", *(f"{number}" for number in range(named)))
    own(*(f"{number}" for number in range(named)))

    result = reconcile("--yes")

    assert (result.status, client.zcard(uploads.keys.pending)) == (1, 0)
    assert (result.complaint.startswith(because), result.complaint.endswith("--expect 3")) == (True, True)
    assert reconcile("--yes", "--expect", "3", "--json").json["registered"] == 3


def test_what_is_registered_waits_a_day_and_no_upload_may_use_its_path(main, reconcile, store):
    stock(store, "orphan")
    reconcile("--yes")
    with pytest.raises(BeingDeleted):
        uploads.prepare(client, "artifacts", "orphan")
    time_passes(DAY - timedelta(minutes=1))

    early = main("run", "stale_direct_uploads", "--json").json
    time_passes(timedelta(minutes=1, seconds=3))
    late = main("run", "stale_direct_uploads", "--json").json

    assert (early["total_deleted_stale_entries"], late["total_deleted_stale_entries"]) == (0, 1)
    assert not (store / "orphan").exists()
    assert client.keys("{pending_direct_uploads}:*") == [uploads.keys.epoch.encode()]


def test_what_lies_outside_the_folders_is_not_registered(store, reconcile):
    stock(store, "up/orphan", "down/orphan")

    answer = reconcile("--yes", "--json", OBJECT_PREFIXES='{"artifacts": ["up"]}')

    assert (answer.json["outside"], answer.json["orphans"]) == (1, ["up/orphan"])
    assert members(uploads.keys.pending) == {"artifacts:up/orphan"}


# What was registered is taken back


def test_what_was_registered_can_be_taken_back_by_its_name(main, reconcile, store):
    stock(store, "a", "b")
    reconcile("--yes")

    one = main("uploads", "forget", "artifacts:a", "--json").json

    assert (one, members(uploads.keys.pending)) == ({"forgotten": ["artifacts:a"], "too_late": []}, {"artifacts:b"})


def test_what_a_producer_registered_is_never_forgotten(main, reconcile, store):
    stock(store, "orphan")
    reconcile("--yes")
    uploads.prepare(client, "artifacts", "upload")

    result = main("uploads", "forget", "artifacts:upload")
    main("uploads", "forget", "--all")

    assert (result.status, members(uploads.keys.pending)) == (1, {"artifacts:upload"})
    assert result.complaint == "artifacts:upload is not an entry that `uploads reconcile` registered"


def test_what_is_being_deleted_just_now_is_not_taken_back(main, reconcile, store):
    stock(store, "a")
    reconcile("--yes")
    time_passes(DAY + timedelta(minutes=1))
    uploads.claim(client, visibility=timedelta(minutes=5), limit=100)

    one, every = main("uploads", "forget", "artifacts:a"), main("uploads", "forget", "--all", "--json")

    assert (one.status, one.complaint) == (1, "artifacts:a is being deleted now")
    assert every.json == {"forgotten": [], "too_late": ["artifacts:a"]}


# Several registers


@pytest.fixture
def packages():
    """The register of another batch."""

    @batch(cron="off", budget=timedelta(minutes=1))
    def stale_packages(now):
        """Delete packages whose upload never completed."""
        return Objects(Register("new_packages", older_than=DAY), unless=NamedBy(JobArtifact))

    yield RedisRegister(stale_packages.registered_objects.register)
    del BATCHES["stale_packages"]


def test_of_several_registers_one_has_to_be_named(packages, main, reconcile, store):
    stock(store, "orphan")
    names = "stale_direct_uploads, stale_packages"

    unnamed, wrong = reconcile(), main("uploads", "forget", "--all", "--batch", "prune")
    reconcile("--yes", "--batch", "stale_packages")

    assert (unnamed.status, wrong.status) == (2, 2)
    assert unnamed.complaint == f"several batches have a register of uploads; name one with --batch: {names}"
    assert wrong.complaint == f"prune has no register of uploads; these batches have a register: {names}"
    assert (members(packages.keys.pending), members(uploads.keys.pending)) == ({"artifacts:orphan"}, set())


def test_an_object_that_another_register_names_is_no_orphan(packages, reconcile, store):
    stock(store, "known")
    packages.prepare(client, "artifacts", "known")

    assert reconcile("--json", "--batch", "stale_direct_uploads").json["orphans"] == []
