"""What is at work or was given up: `buckets`, `uploads`, `objects`, and runs without a store."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import sentinel, stores
from forgekeeper.storage.outbox import MAX_ATTEMPTS, DeletedObject
from forgekeeper.storage.settled import SettledUpload
from models import JobArtifact
from tests.harness.installation import INSTALLATION
from workers.expired_job_artifacts import buckets
from workers.stale_direct_uploads import by_hand
from workers.stale_direct_uploads import register as uploads
from workers.stale_direct_uploads.entries import BeingDeleted

DAY = timedelta(days=1)
STALE = timedelta(hours=4)
CLOSED_REDIS = "redis://127.0.0.1:1/0"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def restarted():
    stores._opened.clear()
    yield
    stores._opened.clear()


@pytest.fixture
def root(tmp_path):
    """The folder of an object store."""
    root = tmp_path / "objects"
    root.mkdir()
    sentinel.Store("artifacts", f"file://{root}").create_sentinel(INSTALLATION)
    return root


@pytest.fixture
def object_stores(root):
    """The setting that leads to that folder, under two names."""
    return {"OBJECT_STORES": json.dumps({"artifacts": f"file://{root}", "lfs": f"file://{root}"})}


@pytest.fixture
def reconcile(main, object_stores):
    def call(*arguments, location="artifacts", prefix=""):
        return main("uploads", "reconcile", location, "--prefix", prefix, *arguments, **object_stores)

    return call


@pytest.fixture
def orphans(reconcile):
    """Ask which objects nobody answers for."""
    return lambda: reconcile("--json").json["orphans"]


def put(root, *paths, age=2 * DAY):
    changed = (datetime.now(UTC) - age).timestamp()
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        os.utime(file, (changed, changed))


def objects_in(root):
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()} - {sentinel.NAME}


def register(*members, age=STALE):
    client.zadd(uploads.PENDING, dict.fromkeys(members, client.time()[0] - age.total_seconds()))


def give_up(*members):
    register(*members)
    claim = uploads.claim(client, stale_after=timedelta(hours=3), visibility=timedelta(minutes=5), limit=100)
    uploads.reject(client, claim, claim.entries)


def record(path, *, attempts=0):
    store_dir, _, file = path.rpartition("/")
    return DeletedObject.create(store_dir=store_dir, file=file, attempts=attempts).id


def own(*paths):
    """Let a live artifact name each of *paths*."""
    for path in paths:
        JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)


def stock(root, *orphans):
    """Put *orphans* between objects that artifacts name, ten for each: what a run of years has left behind."""
    named = [f"named/{number}" for number in range(10 * len(orphans))]
    put(root, *named, *orphans)
    own(*named)


def time_passes(duration):
    """Let *duration* pass for what lies in the register."""
    for key in (uploads.PENDING, uploads.DELETING, uploads.ADOPTED):
        for member, score in client.zrange(key, 0, -1, withscores=True):
            client.zadd(key, {member: score - duration.total_seconds()})


def members(key):
    return {member.decode() for member in client.zrange(key, 0, -1)}


# Without a store


def test_without_an_object_store_a_run_of_stale_uploads_is_blocked(forgekeeper):
    result = forgekeeper("run", "stale_direct_uploads", "--json")

    nothing = {
        "total_pending_entries": 0,
        "total_deleted_stale_entries": 0,
        "execution_timeout": False,
        "failed_entries": 0,
    }
    assert (result.status, result.json.items() >= nothing.items()) == (3, True)
    assert (result.json["skipped"], "FORGEKEEPER_OBJECT_STORES" in result.json["blocked"]) == ("no_store", True)


def test_without_an_object_store_no_upload_is_claimed(main):
    register("artifacts:a")

    main("run", "stale_direct_uploads")

    assert members(uploads.PENDING) == {"artifacts:a"}


def test_without_an_object_store_a_run_of_delete_objects_is_blocked(main):
    record("a")

    result = main("run", "delete_objects", "--json")

    counts = {"deleted": 0, "missing": 0, "failed": 0, "remaining": 1, "stopped": "no_store"}
    assert (result.status, result.json.items() >= counts.items()) == (3, True)
    assert (result.json["skipped"], "FORGEKEEPER_OBJECT_STORES" in result.json["blocked"]) == ("no_store", True)


@pytest.mark.parametrize("batch", ["stale_direct_uploads", "delete_objects"])
def test_a_run_whose_store_is_away_fails_and_keeps_what_it_did(main, tmp_path, root, batch):
    put(root, "a")
    register("artifacts:a", "lfs:b")
    record("b")
    away = {"artifacts": f"file://{tmp_path}/not/there", "lfs": f"file://{root}"}

    result = main("run", batch, "--json", OBJECT_STORES=json.dumps(away))

    row = JobRun.of(batch).first()
    assert (result.status, result.sentences[-1].count("StoreUnavailable: artifacts")) == (1, 1)
    assert (row.state, row.error.partition(":")[0]) == ("failed", "StoreUnavailable")
    if batch == "stale_direct_uploads":
        assert (row.result["total_pending_entries"], row.result["total_deleted_stale_entries"]) == (2, 1)
    else:
        assert (row.result["remaining"], row.result["stopped"]) == (1, "store_unavailable")


def test_a_run_without_an_object_store_is_blocked(main):
    main("run", "stale_direct_uploads")

    assert JobRun.of("stale_direct_uploads").first().state == "blocked"


def test_a_run_of_stale_uploads_deletes_them(main, root, object_stores):
    put(root, "a", "b")
    register("artifacts:a")

    result = main("run", "stale_direct_uploads", "--json", **object_stores)

    assert (result.json["total_deleted_stale_entries"], objects_in(root)) == (1, {"b"})


def test_a_run_of_delete_objects_deletes_them(main, root, object_stores):
    put(root, "a/b", "b")
    record("a/b")

    result = main("run", "delete_objects", "--json", **object_stores)

    assert (result.json["deleted"], objects_in(root)) == (1, {"b"})


# Buckets


def test_before_the_first_run_there_are_no_buckets(main):
    assert main("buckets", "--json").json == {"available": [], "occupied": []}


def test_buckets_shows_the_free_ones_and_who_has_the_others(main):
    buckets.tidy(client, 5, silent_for=timedelta(minutes=10))
    bucket = buckets.claim(client, 5)

    answer = main("buckets", "--json").json

    (held,) = answer["occupied"]
    assert (held["number"], held["token"]) == (bucket.number, bucket.token)
    assert sorted([held["number"], *answer["available"]]) == [0, 1, 2, 3, 4]


def test_the_table_of_buckets_has_a_line_for_each(main):
    buckets.tidy(client, 5, silent_for=timedelta(minutes=10))
    token = buckets.claim(client, 5).token

    lines = main("buckets").stdout.splitlines()

    assert [line.split()[1] for line in lines[1:]].count("available") == 4
    assert sum(token in line and "occupied" in line for line in lines) == 1


# Objects that nobody answers for


def test_objects_that_nothing_names_are_shown(reconcile, root):
    put(root, "a/1", "a/2", "b")

    answer = reconcile("--json").json

    answer["orphans"].sort()
    assert answer["orphans"] == ["a/1", "a/2", "b"]
    assert (answer["examined"], answer["named"], answer["registered"], answer["due"]) == (3, 0, 0, None)


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--expect", "1"]])
def test_unless_it_is_told_to_reconcile_registers_nothing(reconcile, root, options):
    stock(root, "a")

    result = reconcile(*options)

    assert (result.status, result.stdout.splitlines()[0]) == (0, "a")
    assert by_hand.registered(client, "artifacts", ["a"]) == set()


def test_reconcile_wants_a_prefix(main, object_stores):
    result = main("uploads", "reconcile", "artifacts", **object_stores)

    assert (result.status, "--prefix" in result.complaint) == (2, True)


def test_to_show_and_to_register_at_once_is_wrong_use(reconcile):
    assert reconcile("--yes", "--dry-run").status == 2


def test_only_objects_under_the_prefix_are_looked_at(reconcile, root):
    put(root, "@final/a", "@finally/b", "c")

    answer = reconcile("--json", prefix="@final").json

    assert (answer["examined"], answer["orphans"]) == (1, ["@final/a"])


def test_objects_younger_than_a_day_are_left_alone(orphans, root):
    put(root, "young", age=DAY - timedelta(minutes=1))
    put(root, "old", age=DAY + timedelta(minutes=1))

    assert orphans() == ["old"]


def test_an_object_that_an_artifact_names_is_left_alone(orphans, root):
    put(root, "a/named", "a/orphan")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="a/named")

    assert orphans() == ["a/orphan"]


def test_the_object_of_an_artifact_without_a_path_is_left_alone(orphans, root):
    own("")
    artifact = JobArtifact.get()
    JobArtifact.update(job_id=4711).execute()
    folder = f"73/47/7347/2026_11_02/4711/{artifact.id}"
    put(root, f"{folder}/artifacts.zip", "2015_01/1/4711/ci_build_artifacts.zip", f"{folder}1/a.zip", "2015_01/1/471/a")

    assert sorted(orphans()) == ["2015_01/1/471/a", f"{folder}1/a.zip"]


def test_a_folder_called_as_an_artifact_that_has_a_path_keeps_nothing(orphans, root):
    own("elsewhere")
    path = f"a/{JobArtifact.get().id}/b"
    put(root, path)

    assert orphans() == [path]


@pytest.mark.parametrize("path", ["a/named", "named"])
def test_an_object_in_the_outbox_is_left_alone(orphans, root, path):
    put(root, path, "other/named")
    record(path)

    assert orphans() == ["other/named"]


def test_a_dead_object_of_the_outbox_is_left_alone(orphans, root):
    put(root, "a")
    record("a", attempts=MAX_ATTEMPTS)

    assert orphans() == []


def test_an_object_whose_upload_is_pending_is_left_alone(orphans, root):
    put(root, "a")
    register("artifacts:a")

    assert orphans() == []


def test_an_object_whose_upload_is_pending_elsewhere_is_listed(orphans, root):
    put(root, "a")
    register("lfs:a")

    assert orphans() == ["a"]


def test_an_object_whose_upload_is_being_deleted_is_left_alone(orphans, root):
    put(root, "a")
    register("artifacts:a")
    uploads.claim(client, stale_after=timedelta(hours=3), visibility=timedelta(minutes=5), limit=100)

    assert orphans() == []


def test_an_object_whose_upload_was_given_up_is_left_alone(orphans, root):
    put(root, "a")
    give_up("artifacts:a")

    assert orphans() == []


def test_the_sentinel_is_no_orphan(orphans, root):
    os.utime(root / sentinel.NAME, (0, 0))

    assert orphans() == []


def test_pointed_at_another_installations_store_it_registers_nothing(reconcile, root):
    put(root, *(f"live/{number}" for number in range(35)))

    result = reconcile("--yes")

    assert (result.status, uploads.unsettled(client), client.zcard(uploads.PENDING)) == (1, 0, 0)
    assert result.complaint.startswith("nothing in this database names any of the 35 objects")
    assert result.complaint.endswith("--expect 35")


def test_that_it_would_be_refused_is_said_when_it_shows(reconcile, root):
    put(root, "a")

    shown, as_json = reconcile(), reconcile("--json").json

    assert shown.stdout.splitlines()[-1].startswith("--yes would be refused: nothing in this database names")
    assert as_json["refused"] in shown.stdout


def test_more_than_a_tenth_of_unnamed_objects_are_refused(reconcile, root):
    put(root, "backups/1", "backups/2", *(f"{number}" for number in range(9)))
    own(*(f"{number}" for number in range(9)))

    result = reconcile("--yes")

    assert (result.status, client.zcard(uploads.PENDING)) == (1, 0)
    assert result.complaint.startswith("2 of 11 objects are named by nothing, more than 10%")


def test_a_tenth_of_unnamed_objects_is_registered(reconcile, root):
    put(root, "orphan", *(f"{number}" for number in range(9)))
    own(*(f"{number}" for number in range(9)))

    assert reconcile("--yes", "--json").json["registered"] == 1


def test_what_lies_in_the_outbox_is_named_by_the_database(reconcile, root):
    put(root, "orphan", *(f"{number}" for number in range(9)))
    for number in range(9):
        record(f"{number}")

    assert reconcile("--yes", "--json").json["registered"] == 1


def test_what_the_register_names_does_not_prove_the_database(reconcile, root):
    put(root, "orphan", *(f"{number}" for number in range(9)))
    register(*(f"artifacts:{number}" for number in range(9)))

    assert reconcile("--yes").complaint.startswith("nothing in this database names any of the 10 objects")


@pytest.mark.parametrize("others", [0, 3])
def test_whoever_repeats_the_number_of_objects_may_register_them(reconcile, root, others):
    put(root, *"abc", *(f"{number}" for number in range(others)))
    own(*(f"{number}" for number in range(others)))

    assert reconcile("--yes", "--expect", "3", "--json").json["registered"] == 3


@pytest.mark.parametrize("expected", [2, 4])
def test_another_number_than_is_found_is_refused(reconcile, root, expected):
    stock(root, *"abc")

    result = reconcile("--yes", "--expect", f"{expected}")

    assert (result.status, client.zcard(uploads.PENDING)) == (1, 0)
    assert result.complaint == f"{expected} objects were expected and 3 are named by nothing"


def test_where_nothing_is_an_orphan_nothing_is_refused(reconcile):
    assert reconcile("--yes", "--json").json["registered"] == 0


def test_what_is_registered_waits_a_day(main, reconcile, root, object_stores):
    stock(root, "orphan")
    reconcile("--yes")
    time_passes(DAY - timedelta(minutes=1))

    early = main("run", "stale_direct_uploads", "--json", **object_stores).json
    time_passes(timedelta(minutes=1, seconds=3))
    late = main("run", "stale_direct_uploads", "--json", **object_stores).json

    assert (early["total_deleted_stale_entries"], late["total_deleted_stale_entries"]) == (0, 1)
    assert "orphan" not in objects_in(root)
    assert client.keys("{pending_direct_uploads}:*") == []


def test_when_it_is_due_is_said(reconcile, root):
    stock(root, "orphan")

    due = datetime.fromisoformat(reconcile("--yes", "--json").json["due"])

    assert abs(due - now() - DAY) < timedelta(minutes=1)


def test_what_waits_is_no_pending_upload(main, reconcile, root, object_stores):
    stock(root, "orphan")
    reconcile("--yes")
    uploads.prepare(client, "artifacts", "upload")

    counted = main("run", "stale_direct_uploads", "--json", **object_stores).json["total_pending_entries"]

    assert (counted, uploads.count(client)) == (1, 1)


def spoil(what, root):
    """Let something answer for the registered object "orphan" meanwhile."""
    match what:
        case "an artifact":
            own("orphan")
        case "the outbox":
            record("orphan")
            DeletedObject.update(pick_up_at=now() + DAY).execute()
        case "another object":
            put(root, "orphan", age=timedelta())


@pytest.mark.parametrize("what", ["an artifact", "the outbox", "another object"])
def test_what_something_answers_for_when_its_day_has_passed_is_kept(main, reconcile, root, object_stores, what):
    stock(root, "orphan")
    reconcile("--yes")
    spoil(what, root)
    time_passes(DAY + timedelta(minutes=1))

    result = main("run", "stale_direct_uploads", "--json", **object_stores).json

    assert ("orphan" in objects_in(root), result["total_deleted_stale_entries"]) == (True, 0)
    assert client.keys("{pending_direct_uploads}:*") == []


def test_an_upload_to_the_path_of_a_waiting_object_is_refused(reconcile, root):
    stock(root, "orphan")
    reconcile("--yes")

    with pytest.raises(BeingDeleted):
        uploads.prepare(client, "artifacts", "orphan")


def test_reconciling_twice_registers_once(reconcile, root):
    stock(root, "a")
    reconcile("--yes")

    assert reconcile("--yes", "--json").json["registered"] == 0
    assert members(uploads.PENDING) == {"artifacts:a"}


# What was registered is taken back


def test_what_was_registered_can_be_taken_back(main, reconcile, root):
    stock(root, "a", "b")
    reconcile("--yes")

    result = main("uploads", "forget", "artifacts:a", "--json")

    assert (result.json, members(uploads.PENDING)) == ({"forgotten": ["artifacts:a"], "too_late": []}, {"artifacts:b"})


def test_all_that_was_registered_can_be_taken_back_at_once(main, reconcile, root):
    stock(root, "a", "b")
    reconcile("--yes")

    result = main("uploads", "forget", "--all")

    assert (result.status, result.stdout.splitlines()[-1]) == (0, "2 forgotten")
    assert client.keys("{pending_direct_uploads}:*") == []


def test_what_was_registered_can_be_taken_back_below_a_prefix(main, reconcile, root):
    stock(root, "@final/a", "@finally/a", "a")
    reconcile("--yes")

    forgotten = main("uploads", "forget", "--all", "--prefix", "@final/", "--json").json["forgotten"]

    assert (forgotten, members(uploads.PENDING)) == (["artifacts:@final/a"], {"artifacts:@finally/a", "artifacts:a"})


def test_what_a_producer_registered_is_never_forgotten(main, reconcile, root):
    stock(root, "orphan")
    reconcile("--yes")
    uploads.prepare(client, "artifacts", "upload")

    result = main("uploads", "forget", "artifacts:upload")
    main("uploads", "forget", "--all")

    assert (result.status, members(uploads.PENDING)) == (1, {"artifacts:upload"})
    assert result.complaint == "artifacts:upload is not among what `reconcile` has registered"


def test_what_could_not_be_deleted_can_still_be_taken_back(main, reconcile, root):
    stock(root, "waits", "lost")
    reconcile("--yes")
    time_passes(DAY + timedelta(minutes=1))
    claim = uploads.claim(client, stale_after=timedelta(hours=3), visibility=timedelta(minutes=5), limit=100)
    lost = [entry for entry in claim.entries if entry.path == "lost"]
    uploads.reject(client, claim, lost)
    uploads.put_back(client, claim, [entry for entry in claim.entries if entry not in lost])

    main("uploads", "forget", "--all")

    assert client.keys("{pending_direct_uploads}:*") == []


def test_what_is_being_deleted_just_now_is_not_taken_back(main, reconcile, root):
    stock(root, "a")
    reconcile("--yes")
    time_passes(DAY + timedelta(minutes=1))
    uploads.claim(client, stale_after=timedelta(hours=3), visibility=timedelta(minutes=5), limit=100)

    one, every = main("uploads", "forget", "artifacts:a"), main("uploads", "forget", "--all", "--json")

    assert (one.status, one.complaint) == (1, "artifacts:a is being deleted just now")
    assert every.json == {"forgotten": [], "too_late": ["artifacts:a"]}


# Stores that are odd


@pytest.mark.parametrize("path", ["ümläut ✓", "a:b", "back\\slash", "a#b", "100%", "a?b"])
def test_an_object_with_an_odd_name_keeps_no_other_from_being_registered(reconcile, root, path):
    stock(root, path, "good")

    result = reconcile("--yes", "--json")

    assert result.status == 0
    assert "artifacts:good" in members(uploads.PENDING)


def test_a_name_that_the_store_cannot_list_ends_reconcile_with_a_sentence(reconcile, root):
    put(root, "line\nbreak", "good")

    result = reconcile()

    assert (result.status, uploads.count(client)) == (1, 0)
    assert "invalid path" in result.complaint


def test_a_page_of_objects_costs_one_question_to_each_table(reconcile, root, query, urls):
    put(root, *(f"{number:04}" for number in range(300)))
    before = scans(query, urls)

    reconcile()

    assert scans(query, urls) - before < 10


def scans(query, urls):
    """How often somebody has gone through the artifacts, by PostgreSQL's statistics."""
    query(urls.database, "select pg_stat_clear_snapshot()")
    counted = "select seq_scan + idx_scan from pg_stat_all_tables where relname = 'ci_job_artifacts'"
    return query(urls.database, counted)[0][0]


def test_an_unknown_location_is_wrong_use_and_the_known_ones_are_named(reconcile):
    result = reconcile(location="nowhere")

    assert result.status == 2
    assert result.complaint == "there is no object store 'nowhere'; there are: artifacts, lfs"


def test_without_any_store_reconcile_says_that_there_is_none(main):
    result = main("uploads", "reconcile", "artifacts", "--prefix", "")

    assert (result.status, result.complaint) == (2, "there is no object store 'artifacts'; there are: none")


def test_reconcile_at_a_store_that_is_away_fails_with_a_sentence(main, tmp_path):
    away = json.dumps({"artifacts": f"file://{tmp_path}/not/there"})

    result = main("uploads", "reconcile", "artifacts", "--prefix", "", OBJECT_STORES=away)

    assert result.status == 1
    assert result.complaint.endswith("`forgekeeper check` looks for the cause")


# Wrong use


@pytest.mark.parametrize(
    "arguments",
    [
        ["uploads", "reconcile"],
        ["uploads", "reconcile", "artifacts"],
        ["uploads", "forget"],
        ["uploads", "forget", "artifacts:a", "--all"],
        ["uploads", "forget", "artifacts:a", "--prefix", "a"],
        ["uploads", "nonsense"],
        ["objects", "held", "--limit", "-1"],
        ["objects", "held", "--limit", "99999999999999999999"],
        ["objects", "nonsense"],
        ["buckets", "1"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_with_a_sentence(main, arguments):
    result = main(*arguments)

    assert (result.status, bool(result.complaint)) == (2, True)


@pytest.mark.parametrize("arguments", [["buckets"], ["uploads", "forget", "--all"]], ids=" ".join)
def test_without_redis_they_fail_with_a_sentence(main, arguments):
    result = main(*arguments, REDIS_URL=CLOSED_REDIS)

    assert (result.status, bool(result.complaint)) == (1, True)


def test_what_lies_outside_the_folders_is_not_registered(root, main, object_stores):
    stock(root, "up/orphan", "down/orphan")
    prefixes = {"OBJECT_PREFIXES": '{"artifacts": ["up"]}'}

    result = main("uploads", "reconcile", "artifacts", "--prefix", "", "--yes", "--json", **object_stores, **prefixes)

    assert (result.json["outside"], result.json["orphans"], members(uploads.PENDING)) == (
        *(1, ["up/orphan"]),
        {"artifacts:up/orphan"},
    )


def test_what_a_producer_has_completed_is_no_orphan(root, main, object_stores):
    put(root, "kept", "orphan")
    SettledUpload.create(location="lfs", path="kept", reaped=False)

    result = main("uploads", "reconcile", "lfs", "--prefix", "", "--json", **object_stores)

    assert (result.json["named"], result.json["orphans"]) == (1, ["orphan"])
