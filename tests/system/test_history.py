"""The checker of histories finds each kind of violation, and none where there is none."""

import json
from collections import Counter
from datetime import UTC, datetime

import pytest

from .history import DAY, PROPERTIES, UPLOAD, Evidence, Final, History, Operation, check, read

NOW = 1_000_000.0
LATER = NOW + 100
HOUR = 3600
KINDS = (
    *("holders", "starts", "transaction", "half entity", "missing", "threads", "counter", "page"),
    *("late", "outlived"),
)
SECRET = "swordfish"


def done(subject, do, outcome="ok", *, at=NOW, value=None, **args):
    return Operation(subject, do, args, at, at + 1, outcome, value)


def iso(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def run(number, tick, **changes):
    ledger = {
        "id": number,
        "batch": "prune",
        "state": "succeeded",
        "reason": None,
        "attempt": 1,
        "failures": 0,
        "losses": 0,
    }
    times = {"tick": tick, "claimed_at": tick, "started_at": tick + 1, "finished_at": tick + 2}
    return {**ledger, **times, **changes}


@pytest.fixture
def logs(tmp_path):
    log = tmp_path / "worker-1.log"
    line = {"message": "run finished", "batch": "prune", "run": 1, "message_id": "1", "seconds": 1.0}
    line["at"] = iso(NOW + 2)
    log.write_text(json.dumps(line) + "\n")
    return [log]


@pytest.fixture
def evidence(logs):
    """A user for each kind of thing, and a forgekeeper that has done what it should."""
    operations = [
        done("status:1", "set", clear=NOW + 5),
        done("status:1", "extend", at=NOW + 3, clear=NOW + HOUR),
        done("status:2", "set", clear=NOW + 5),
        done("status:3", "set", clear="never"),
        done("import:1", "create", status=1, touched=NOW - DAY - 5),
        done("import:1", "resume", at=NOW + 1, touched=NOW),
        done("import:2", "create", status=1, touched=NOW - DAY - 5),
        done("import:2", "resume", "no", at=NOW + 3, touched=NOW),
        done("import:3", "create", status=0, touched=NOW - 60),
        done("import:3", "finish", at=NOW + 1),
        done("entity:1", "create", status=1, touched=NOW - DAY - 5),
        done("artifact:1", "create", path="d/1", expires=NOW + 5, locked=0, type=1),
        done("artifact:1", "lock", at=NOW + 2, locked=1),
        done("artifact:2", "create", path="d/2", expires=NOW + 5, locked=0, type=1),
        done("artifact:3", "create", path="d/3", expires=NOW - 5, locked=0, type=3),
        done("upload:artifacts:a", "prepare"),
        done("upload:artifacts:b", "prepare"),
        done("upload:artifacts:b", "age", at=NOW + 1, since=NOW - UPLOAD - 5),
        done("upload:artifacts:b", "complete", "no", at=NOW + 3),
        done("upload:artifacts:c", "prepare"),
        done("upload:artifacts:c", "complete", at=NOW + 1),
        done("artifact:4", "create", path="c", at=NOW + 2, expires=None, locked=0, type=1),
        done("ref:1:refs/a", "push", oid="1"),
        done("ref:1:refs/a", "list", at=NOW + 1, id=1, expected="1"),
        done("ref:1:refs/a", "push", at=NOW + 3, oid="2"),
        done("ref:1:refs/b", "push", oid="1"),
        done("ref:1:refs/b", "list", at=NOW + 1, id=2, expected=None),
        done("ref:1:refs/c", "push", oid="1"),
        done("redis", "flush", at=NOW - 10),
    ]
    by_subject = {}
    for operation in operations:
        by_subject.setdefault(operation.subject, []).append(operation)
    final = Final(
        now=LATER,
        statuses={"1": NOW + HOUR, "3": None},
        imports={"import:1": [1, NOW], "import:2": [3, LATER], "import:3": [2, NOW - 60], "entity:1": [3, LATER]},
        artifacts={"1": [NOW + 5, 1, 1, "d/1"], "3": [NOW - 5, 0, 3, "d/3"], "4": [None, 0, 1, "c"]},
        register={"pending": {"artifacts:a": NOW}, "deleting": {}, "failed": {"artifacts:\x1b": NOW}},
        requests={"1": ["ref:1:refs/a", "1", 3, "moved"], "2": ["ref:1:refs/b", None, 2, None]},
        refs={"ref:1:refs/a": "2", "ref:1:refs/c": "1"},
        files=["a", "c", "d/1", "d/3"],
        files_then=["a", "c", "d/1", "d/3"],
        named_then=["a", "c", "d/1", "d/3"],
        runs=[run(1, NOW), run(2, NOW + 2, state="skipped", started_at=None)]
        + [run(number, NOW + 2 * number - 2) for number in range(3, 52)],
        effects={"user_status": 3},
        counted={"user_status": 3, "stale_upload": 1},
        buckets={"available": [0, 1], "occupied": [], "max": 2},
    )
    holders = [
        {"db": NOW, "holders": {"bucket 0": "one"}, "available": ["1"]},
        {"db": NOW + 1, "holders": {"bucket 0": "two"}, "available": ["1"]},
    ]
    return Evidence(
        by_subject,
        {"holders": holders},
        Counter(KINDS),
        final,
        logs=logs,
        secrets=(SECRET,),
        periods={"prune": 2},
        longest={"prune": 30.0, "delete_artifact_bucket": 300.0},
        recoveries=[3.0],
    )


def broken(evidence):
    return [name for name, sentences in check(evidence).items() if sentences]


def test_a_history_that_is_possible_breaks_nothing(evidence):
    assert broken(evidence) == []


def a_status_is_left(evidence):
    evidence.final.statuses["2"] = NOW + 5


def a_stale_import_is_left(evidence):
    evidence.operations["import:4"] = [done("import:4", "create", status=1, touched=NOW - DAY - 5)]
    evidence.final.imports["import:4"] = [1, NOW - DAY - 5]


def an_expired_artifact_is_left(evidence):
    evidence.final.artifacts["2"] = [NOW + 5, 0, 1, "d/1"]


def an_object_waits_in_the_outbox(evidence):
    evidence.final.outbox.append(["gone", NOW, 3])


def a_stale_upload_is_left_pending(evidence):
    evidence.final.register["pending"]["artifacts:z"] = NOW - UPLOAD - 50


def an_upload_is_given_up(evidence):
    evidence.final.register["failed"]["artifacts:z"] = NOW


def the_object_of_a_reaped_upload_is_left(evidence):
    for files in (evidence.final.files, evidence.final.files_then, evidence.final.named_then):
        files.append("b")


def a_ref_deletion_is_left(evidence):
    evidence.final.requests["2"][2] = 1


def a_ref_deletion_is_closed_and_its_ref_there(evidence):
    evidence.final.refs["ref:1:refs/b"] = "1"


def a_ref_deletion_has_vanished(evidence):
    del evidence.final.requests["2"]


def old_records_are_left(evidence):
    evidence.final.old_requests = 3


def a_message_is_nowhere(evidence):
    evidence.final.stranded.append("git clean_project_refs:1")


def an_extended_status_is_gone(evidence):
    del evidence.final.statuses["1"]


def a_status_without_an_end_is_gone(evidence):
    del evidence.final.statuses["3"]


def a_user_cannot_extend_a_status_that_is_not_due(evidence):
    evidence.operations["status:4"] = [
        done("status:4", "set", clear=NOW + 50),
        done("status:4", "extend", "no", at=NOW + 3, clear=NOW + HOUR),
    ]


def a_resumed_import_has_timed_out(evidence):
    evidence.final.imports["import:1"] = [3, LATER]


def without(evidence, number, path):
    del evidence.final.artifacts[number]
    evidence.final.files.remove(path)


def a_locked_artifact_is_gone(evidence):
    without(evidence, "1", "d/1")


def a_trace_is_gone(evidence):
    without(evidence, "3", "d/3")


def a_fresh_upload_is_reaped(evidence):
    evidence.final.register["pending"] = {}
    evidence.final.files.remove("a")


def a_fresh_upload_cannot_complete(evidence):
    evidence.operations["upload:artifacts:e"] = [
        done("upload:artifacts:e", "prepare"),
        done("upload:artifacts:e", "complete", "no", at=NOW + 1),
    ]


def a_completed_upload_has_lost_its_row(evidence):
    without(evidence, "4", "c")


def a_ref_made_anew_is_gone(evidence):
    del evidence.final.refs["ref:1:refs/a"]


def a_ref_that_nobody_listed_is_gone(evidence):
    del evidence.final.refs["ref:1:refs/c"]


def an_object_is_gone_in_the_end(evidence):
    evidence.final.files.remove("c")


def an_object_was_gone_for_a_moment(evidence):
    evidence.samples["missing"] = [{"artifact": 1, "path": "d/1"}]


def an_object_is_named_by_nothing(evidence):
    evidence.final.files_then.append("orphan")


def the_object_of_a_destroyed_artifact_is_left(evidence):
    evidence.final.files.append("d/2")


def a_token_comes_back(evidence):
    evidence.samples["holders"].append({"db": NOW + 9, "holders": {"bucket 0": "one"}})


def a_token_holds_two_buckets(evidence):
    evidence.samples["holders"].append({"db": NOW + 9, "holders": {"bucket 0": "three", "bucket 1": "three"}})


def a_bucket_is_available_and_held(evidence):
    evidence.samples["holders"].append({"db": NOW + 9, "holders": {"bucket 1": "four"}, "available": ["1"]})


def a_bucket_is_lost(evidence):
    evidence.final.buckets["available"].remove(1)


def a_bucket_is_there_twice(evidence):
    evidence.final.buckets["occupied"].append(1)


def a_tick_is_missing(evidence):
    evidence.final.runs.pop(1)


def ticks_have_stopped(evidence):
    del evidence.final.runs[-5:]


def a_batch_never_had_a_tick(evidence):
    evidence.periods["stale_imports"] = 2


def a_tick_was_claimed_early(evidence):
    evidence.final.runs[0]["claimed_at"] -= 60


def a_run_was_closed_well_twice(evidence):
    evidence.logs[0].write_text(2 * evidence.logs[0].read_text())


def a_run_was_closed_well_by_one_of_another_batch(evidence):
    evidence.final.runs[0]["batch"] = "stale_imports"
    evidence.periods = {}


def a_run_that_was_closed_well_has_failed(evidence):
    evidence.final.runs[0]["state"] = "failed"


def a_run_is_open_for_ever(evidence):
    evidence.final.runs[1]["state"] = "enqueued"


def nothing_ran_after_the_faults(evidence):
    evidence.recoveries.append(float("inf"))


def bytes_were_taken_off_twice(evidence):
    evidence.final.wrong_statistics.append(1)


def a_run_with_nothing_to_do_changed_something(evidence):
    evidence.final.changed_at_rest.append("refs")


def an_import_has_come_from_nowhere(evidence):
    evidence.operations["import:5"] = [done("import:5", "create", "failed", status=1, touched=NOW)]
    evidence.final.imports["import:5"] = [1, NOW]


def a_run_took_too_long(evidence):
    evidence.final.runs[0]["finished_at"] += HOUR


def a_run_failed_too_late(evidence):
    line = {"message": "run failed", "batch": "prune", "message_id": "1", "seconds": HOUR}
    evidence.logs[0].write_text(json.dumps(line) + "\n")


def a_child_took_too_long(evidence):
    child = {"message": "child failed", "batch": "delete_artifact_bucket", "message_id": "1", "seconds": HOUR}
    evidence.logs[0].write_text(json.dumps(child) + "\n")


def transaction(seconds):
    return {"application": "forgekeeper worker", "state": "active", "seconds": seconds, "db": NOW + 20}


def a_transaction_was_old(evidence):
    evidence.samples["transaction"] = [transaction(11.0)]


def a_finished_import_has_timed_out(evidence):
    evidence.final.imports["import:3"] = [3, LATER]


def an_entity_was_half_timed_out(evidence):
    evidence.samples["half entity"] = [{"entities": [1]}]


def an_entity_is_half_timed_out(evidence):
    evidence.final.half_entities.append(1)


def a_counter_fell(evidence):
    evidence.samples["counter"] = [{"name": "runs", "was": 2, "is": 1}]


def more_was_counted_than_done(evidence):
    evidence.final.counted["user_status"] += 1


def something_done_was_not_counted(evidence):
    evidence.final.effects["entity"] = 1


def nobody_compared_counts(evidence):
    evidence.final.effects.clear()


def a_process_had_lost_a_thread(evidence):
    evidence.samples["threads"] = [{"service": "cron", "threads": 3}]


def a_process_outlived_its_master(evidence):
    evidence.samples["orphans"] = [{"service": "cron"}]


def a_message_was_started_too_often(evidence):
    evidence.samples["starts"] = [{"message": "clean_project_refs:1", "count": 4}]


def a_run_took_too_many_workers_down(evidence):
    evidence.final.runs[0]["losses"] = 4


def redis_refused_something(evidence):
    evidence.samples["refused"] = [{"sentence": "forgekeeper-worker was refused keys (command, lua)"}]


def a_refusal_is_logged(evidence):
    evidence.logs[0].write_text('{"message": "collector failed", "error": "permission denied for table job_runs"}\n')


def a_secret_is_logged(evidence):
    evidence.logs[0].write_text(f"redis://:{SECRET}@host\n")


def a_users_text_is_logged_as_it_is(evidence):
    evidence.logs[0].write_text("\x1b[31m\n")


def a_secret_is_on_a_page(evidence):
    evidence.samples["page"] = [{"service": "cron"}]


def due_work_is_left(evidence):
    facts = {"batch": "git_ref_cleanup", "due": 136, "count": 136, "left": [1, 2], "seconds": 61.0}
    evidence.samples["late"] = [facts]


def a_process_outlived_its_sigterm(evidence):
    evidence.samples["outlived"] = [{"service": "cron", "who": ["-m cli worker"], "seconds": 31.0}]


PLANTED = {
    "P0": (redis_refused_something, a_refusal_is_logged),
    "P1": (
        a_status_is_left,
        a_stale_import_is_left,
        an_expired_artifact_is_left,
        an_object_waits_in_the_outbox,
        a_stale_upload_is_left_pending,
        an_upload_is_given_up,
        the_object_of_a_reaped_upload_is_left,
        a_ref_deletion_is_left,
        a_ref_deletion_is_closed_and_its_ref_there,
        a_ref_deletion_has_vanished,
        old_records_are_left,
        a_message_is_nowhere,
    ),
    "P2": (
        an_extended_status_is_gone,
        a_status_without_an_end_is_gone,
        a_user_cannot_extend_a_status_that_is_not_due,
        a_resumed_import_has_timed_out,
        a_locked_artifact_is_gone,
        a_trace_is_gone,
        a_fresh_upload_is_reaped,
        a_fresh_upload_cannot_complete,
        a_completed_upload_has_lost_its_row,
        a_ref_made_anew_is_gone,
        a_ref_that_nobody_listed_is_gone,
    ),
    "P3": (an_object_is_gone_in_the_end, an_object_was_gone_for_a_moment),
    "P4": (an_object_is_named_by_nothing, the_object_of_a_destroyed_artifact_is_left),
    "P5": (a_token_comes_back, a_token_holds_two_buckets, a_bucket_is_available_and_held),
    "P6": (a_bucket_is_lost, a_bucket_is_there_twice),
    "P7": (
        a_tick_is_missing,
        ticks_have_stopped,
        a_batch_never_had_a_tick,
        a_tick_was_claimed_early,
        a_run_was_closed_well_twice,
        a_run_was_closed_well_by_one_of_another_batch,
        a_run_that_was_closed_well_has_failed,
        a_run_is_open_for_ever,
        nothing_ran_after_the_faults,
    ),
    "P8": (bytes_were_taken_off_twice, a_run_with_nothing_to_do_changed_something, an_import_has_come_from_nowhere),
    "P9": (a_run_took_too_long, a_run_failed_too_late, a_child_took_too_long),
    "P10": (a_transaction_was_old,),
    "P11": (a_finished_import_has_timed_out, an_entity_was_half_timed_out, an_entity_is_half_timed_out),
    "P12": (a_counter_fell, more_was_counted_than_done, something_done_was_not_counted, nobody_compared_counts),
    "P13": (a_process_had_lost_a_thread, a_process_outlived_its_master),
    "P14": (a_message_was_started_too_often, a_run_took_too_many_workers_down),
    "P15": (a_secret_is_logged, a_users_text_is_logged_as_it_is, a_secret_is_on_a_page),
    "P16": (due_work_is_left,),
    "P17": (a_process_outlived_its_sigterm,),
}


@pytest.mark.parametrize(
    ("name", "plant"), [pytest.param(name, plant, id=plant.__name__) for name in PLANTED for plant in PLANTED[name]]
)
def test_the_checker_finds_it_and_blames_the_right_property(evidence, name, plant):
    plant(evidence)

    assert broken(evidence) == [name]


def test_each_property_has_a_violation_that_is_found():
    assert PLANTED.keys() == PROPERTIES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_property_that_nobody_looked_at_does_not_hold(evidence, kind):
    evidence.looked[kind] = 0

    assert broken(evidence) != []


# What nobody saw the end of


@pytest.mark.parametrize("there", [True, False])
def test_an_extension_that_nobody_saw_the_end_of_may_have_come_in_time_or_not(evidence, there):
    evidence.operations["status:2"].append(done("status:2", "extend", "maybe", at=NOW + 3, clear=NOW + HOUR))
    if there:
        evidence.final.statuses["2"] = NOW + HOUR

    assert broken(evidence) == []


def test_a_status_is_missed_that_was_not_due_either_way(evidence):
    evidence.operations["status:1"].append(done("status:1", "extend", "maybe", at=NOW + 6, clear=NOW + 2 * HOUR))
    del evidence.final.statuses["1"]

    assert broken(evidence) == ["P2"]


def test_an_upload_that_redis_has_forgotten_cannot_complete_and_leaves_its_object(evidence):
    evidence.operations["redis"].append(done("redis", "flush", at=NOW + 1))
    evidence.operations["upload:artifacts:a"].append(done("upload:artifacts:a", "complete", "no", at=NOW + 2))
    evidence.final.register["pending"] = {}

    assert broken(evidence) == []


def test_a_ref_may_go_between_its_listing_and_its_making_anew(evidence):
    evidence.operations["ref:1:refs/a"].insert(2, done("ref:1:refs/a", "read", at=NOW + 2, value=None))

    assert broken(evidence) == []


def test_a_read_that_nobody_can_have_made_is_found(evidence):
    evidence.operations["ref:1:refs/a"].insert(1, done("ref:1:refs/a", "read", value=None))

    assert broken(evidence) == ["P2"]


# Servers that went back


def went_back(evidence, server, *, kept, returned):
    """Let *server* go back, at one moment, to what it knew at another."""
    evidence.operations.setdefault(server, []).extend(
        Operation(server, do, {}, at, at + 0.5, "ok") for do, at in (("keep", kept), ("return", returned))
    )


def test_what_users_did_between_the_copy_and_its_return_is_undone(evidence):
    went_back(evidence, "postgres", kept=NOW - 5, returned=NOW + 10)
    evidence.final.statuses.clear()
    evidence.final.imports.clear()
    evidence.final.artifacts = {}
    evidence.final.requests.clear()
    evidence.final.runs[0]["state"] = "failed"
    evidence.final.named_then = evidence.final.files_then = ["a"]

    assert broken(evidence) == []


def test_what_was_done_before_the_copy_is_still_true(evidence):
    went_back(evidence, "postgres", kept=NOW + 6, returned=NOW + 10)
    del evidence.final.statuses["1"]

    assert broken(evidence) == ["P2"]


def test_what_is_extended_again_after_the_return_counts(evidence):
    went_back(evidence, "postgres", kept=NOW + 1.5, returned=NOW + 10)
    evidence.operations["status:1"].append(done("status:1", "extend", at=NOW + 20, clear=NOW + 2 * HOUR))

    assert broken(evidence) == ["P2"]

    del evidence.walks
    evidence.final.statuses["1"] = NOW + 2 * HOUR

    assert broken(evidence) == []


def test_an_extension_that_was_undone_protects_nothing(evidence):
    went_back(evidence, "postgres", kept=NOW + 1.5, returned=NOW + 10)
    del evidence.final.statuses["1"]

    assert broken(evidence) == []


@pytest.mark.parametrize("answer", ["ok", "no"])
def test_beside_the_return_itself_an_operation_may_be_undone_or_not(evidence, answer):
    went_back(evidence, "postgres", kept=NOW + 1.5, returned=NOW + 10)
    evidence.operations["status:1"].append(done("status:1", "extend", answer, at=NOW + 10, clear=NOW + 2 * HOUR))
    del evidence.final.statuses["1"]

    assert broken(evidence) == []


def test_a_destroyed_artifact_that_came_back_has_lost_its_object(evidence):
    went_back(evidence, "postgres", kept=NOW + 4.1, returned=NOW + 10)
    evidence.final.artifacts["2"] = [LATER + HOUR, 0, 1, "d/2"]
    evidence.operations["artifact:2"].append(done("artifact:2", "extend", at=NOW + 12, expires=LATER + HOUR))
    evidence.samples["missing"] = [{"artifact": 2, "path": "d/2"}]

    assert broken(evidence) == []


def test_an_artifact_that_was_there_all_the_time_has_its_object(evidence):
    went_back(evidence, "postgres", kept=NOW + 20, returned=NOW + 30)
    evidence.final.files.remove("c")

    assert broken(evidence) == ["P3"]


def test_an_artifact_that_was_forgotten_leaves_its_object_to_reconcile_but_one_destroyed_later_does_not(evidence):
    went_back(evidence, "postgres", kept=NOW + 5, returned=NOW + 10)
    expired = {"path": "d/2", "expires": NOW, "locked": 0, "type": 1}
    evidence.operations["artifact:2"] = [done("artifact:2", "create", at=NOW + 6, **expired)]
    evidence.final.files.append("d/2")

    assert broken(evidence) == []

    evidence.operations["postgres"].clear()
    del evidence.returns
    del evidence.walks

    assert broken(evidence) == ["P4"]


def test_a_run_that_was_undone_may_run_again(evidence):
    went_back(evidence, "postgres", kept=NOW - 5, returned=NOW + 4)
    log = evidence.logs[0]
    line = json.loads(log.read_text())
    log.write_text("".join(json.dumps(line | {"at": iso(at)}) + "\n" for at in (NOW + 2, NOW + 8)))

    assert check(evidence)["P7"] == []


def test_a_completed_upload_may_be_registered_again_and_a_reaped_one_may_not_complete(evidence):
    went_back(evidence, "redis", kept=NOW + 1.6, returned=NOW + 10)
    evidence.operations["upload:artifacts:c"][1] = done("upload:artifacts:c", "complete", at=NOW + 3)
    evidence.final.register["pending"]["artifacts:c"] = NOW

    assert broken(evidence) == []

    evidence.operations["upload:artifacts:b"][2] = done("upload:artifacts:b", "complete", "no", at=NOW + 3)
    evidence.operations["upload:artifacts:b"].append(done("upload:artifacts:b", "complete", at=NOW + 20))
    del evidence.walks

    assert broken(evidence) == ["P2"]


def test_an_upload_that_was_forgotten_cannot_complete_and_leaves_its_object(evidence):
    went_back(evidence, "redis", kept=NOW - 5, returned=NOW + 1)
    evidence.operations["upload:artifacts:a"].append(done("upload:artifacts:a", "complete", "no", at=NOW + 3))
    evidence.final.register["pending"] = {}

    assert broken(evidence) == []


def test_who_held_a_bucket_when_redis_was_copied_holds_it_again(evidence):
    went_back(evidence, "redis", kept=NOW, returned=NOW + 8)
    a_token_comes_back(evidence)

    assert broken(evidence) == []


def test_a_transaction_does_not_grow_old_while_the_server_is_frozen(evidence):
    evidence.operations["postgres"] = [Operation("postgres", "freeze", {}, NOW + 12, NOW + 16, "ok")]
    evidence.samples["transaction"] = [transaction(13.0)]

    assert broken(evidence) == []

    evidence.samples["transaction"] = [transaction(15.0)]

    assert broken(evidence) == ["P10"]


# The file


def test_what_is_written_down_is_read_again(tmp_path):
    history = History(tmp_path / "history")
    number = history.intend("status:1", "set", {"clear": NOW}, at=NOW)
    history.result(number, "status:1", "set", "ok", at=NOW + 1, value=True)
    history.sample("holders", holders={})
    history.close()

    operations, samples = read(history.path)

    assert operations == {"status:1": [Operation("status:1", "set", {"clear": NOW}, NOW, NOW + 1, "ok", value=True)]}
    assert [sample["holders"] for sample in samples["holders"]] == [{}]


def test_an_intent_without_a_result_is_a_maybe_without_an_end(tmp_path):
    history = History(tmp_path / "history")
    history.intend("status:1", "set", {"clear": NOW}, at=NOW)
    history.close()

    (operation,) = read(history.path)[0]["status:1"]

    assert (operation.outcome, operation.ended) == ("maybe", float("inf"))
