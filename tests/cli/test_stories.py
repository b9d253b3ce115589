"""`why` and `ticks`: what became of ticks and runs."""

import re
from datetime import timedelta

import pytest

from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger import manual_runs, reconcile
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import now
from tests.harness.performing import start_run

NAME = "user_status_cleanup"
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
ERROR = "RuntimeError: something went quite wrong in here"
BEGUN = {"deleted": 7, "batches": 1, "stopped": "drained"}

pytestmark = pytest.mark.usefixtures("database")


def written(instant):
    return instant.strftime("%Y-%m-%d %H:%M:%S")


def minute():
    return now().replace(second=0, microsecond=0)


def claimed(tick=None):
    return JobRun.claim(NAME, tick or minute(), by="sched-1:7", reason=None)


def started(run_id, by="worker-2:9"):
    return start_run(NAME, run_id, by=by)


def reconciled():
    reconcile.reconcile_batch(NAME, load_settings(), enqueue_run, by="sched-1:7")


def registered(ago):
    """Make the batch known for so long, as if schedulers had been away since."""
    Batch.register([NAME])
    Batch.update(registered_at=now() - ago).execute()


def stop():
    Hold.add(NAME, "stop", reason="wrong rows go", by="alice@host")


def begun():
    return JobRun.start_here(NAME, by="worker-1:9")


def fell_silent():
    """Let a minute pass since the last heartbeat, and a scheduler take note of it."""
    JobRun.update(alive_at=JobRun.alive_at - MINUTE).where(JobRun.state == "started").execute()
    JobRun.reopen_lost(NAME, dead_after=timedelta(seconds=15))
    reconcile.send_open_run(NAME, enqueue_run)


def only(state):
    """Return the newest tick in that state."""
    return JobRun.select_newest_first(NAME).where(JobRun.state == state).order_by(JobRun.tick.desc()).first().tick


@pytest.fixture
def story(main):
    """Ask why, at a tick if one is given, and return the answer's lines."""

    def ask(tick=None):
        result = main("why", NAME, *([] if tick is None else [written(tick)]))
        assert (result.status, result.stderr) == (0, "")
        return result.stdout.splitlines()

    return ask


def test_a_tick_that_succeeded_names_scheduler_worker_and_result(story):
    run_id = claimed(minute() - 2 * MINUTE)
    JobRun.update(claimed_at=JobRun.tick + timedelta(seconds=0.4)).execute()
    reconcile.send_open_run(NAME, enqueue_run)
    JobRun.succeed(started(run_id), {"deleted": 150, "batches": 2})
    at = {"enqueued_at": 0.5, "started_at": 1, "finished_at": 4}
    JobRun.update({name: JobRun.tick + timedelta(seconds=after) for name, after in at.items()}).execute()

    told = story()

    run = JobRun.get_by_id(run_id)
    assert told == [
        f"The tick of {written(run.tick)} was claimed by scheduler sched-1:7, 0.4 s after it was due.",
        f"It was sent to the workers at {written(run.enqueued_at)}.",
        f"It was started by worker worker-2:9 at {written(run.started_at)}, 1.0 s after it was due.",
        "It succeeded after 3.0 s: batches=2 deleted=150.",
    ]


@pytest.mark.parametrize(
    ("in_the_way", "why"),
    [
        (lambda: JobRun.start_here(NAME, by="ops:1"), "an earlier run was still open: run 1, which ops:1 had started"),
        (stop, "the batch was stopped"),
        (lambda: Hold.add(NAME, "breaker", by="worker-1:9", reason="90 % would go"), "the batch was held"),
    ],
    ids=["overlap", "stopped", "held"],
)
def test_a_tick_that_was_skipped_says_why(story, in_the_way, why):
    registered(1.5 * MINUTE)
    in_the_way()
    reconciled()

    told = story(only("skipped"))

    assert "was found by scheduler sched-1:7" in told[0]
    assert told[1] == f"It was skipped, because {why}."


def test_a_tick_that_was_skipped_names_who_paused_it(main, story):
    registered(1.5 * MINUTE)
    main("pause", NAME, "--until", "1h", "--reason", "a migration", ACTOR="alice")
    reconciled()

    told = story(only("skipped"))

    assert [re.sub(r" at \d.*?: ", ": ", line) for line in told[:3:2]] == [
        f"alice did this: pause {NAME} (a migration).",
        "It was skipped, because the batch was paused.",
    ]


@pytest.mark.parametrize(
    ("act", "batch", "ended"),
    [
        (["stop", NAME, "--reason", "wrong rows go"], NAME, {"state": "skipped", "reason": "stopped"}),
        (
            ["flags", "off", "bulk_delete_job_artifacts"],
            "expired_job_artifacts",
            {"state": "succeeded", "result": {"skipped": "flag_off"}},
        ),
    ],
    ids=["stopped", "switched off"],
)
def test_a_run_that_did_nothing_names_who_was_in_its_way_since_before_it(main, act, batch, ended):
    main(*act, ACTOR="alice")
    later = dict.fromkeys(("tick", "claimed_at", "started_at", "finished_at"), now() + HOUR)
    run = JobRun.create(batch=batch, **later, **ended)

    told = main("why", str(run.id)).stdout.splitlines()

    assert told[0].startswith("alice did this at ")
    assert f": {' '.join(act[:2])}" in told[0]


def test_a_run_that_kills_its_workers_is_told_as_poison(story):
    run_id = claimed()
    for _ in range(3):
        started(run_id)
        fell_silent()

    given_up = "It was given up as poison, because it has killed 3 workers."
    assert story()[-1] == f"{given_up} The last error was: the worker was lost: worker-2:9."


@pytest.mark.parametrize(
    ("away", "state", "said"),
    [
        (1.5 * HOUR, "missed", "It was skipped: no scheduler was running, and it was too old when a scheduler ran"),
        (5 * MINUTE, "coalesced", "It was skipped: no scheduler claimed it in time, and a newer tick did its work."),
    ],
)
def test_a_tick_of_an_outage_says_what_became_of_it(story, away, state, said):
    registered(away)
    reconciled()

    assert story(only(state))[-1].startswith(said)


def test_a_run_that_succeeds_after_a_kill_tells_of_both_attempts(story):
    run_id = claimed()
    started(run_id, by="worker-2:9")
    fell_silent()
    JobRun.succeed(started(run_id, by="worker-3:4"), {"deleted": 1})

    told = " ".join(story())

    assert "stopped sending heartbeats (once), and the run was reopened for another worker." in told
    assert "Attempt 2 was started by worker worker-3:4" in told
    assert told.endswith("s: deleted=1.")


def test_the_error_of_each_attempt_is_told_also_of_a_run_that_succeeded_in_the_end(main, story):
    run_id, errors = claimed(), ("OperationalError: refused", "DataError: too long")
    for number, error in enumerate(errors, start=1):
        JobRun.fail(started(run_id, by=f"worker-{number}:9"), error, {"deleted": number}, delay=timedelta(0))
        reconcile.send_open_run(NAME, enqueue_run)
    JobRun.succeed(started(run_id, by="worker-3:9"), {"deleted": 3})

    told = [line for line in story() if line.startswith("Attempt")]
    run = main("why", NAME, "--json").json["run"]

    assert [re.sub(r" at \S+ \S+(: |, .*)", r" at T\1", line).split(", ")[0] for line in told] == [
        "Attempt 1 was started by worker worker-1:9 at T: OperationalError: refused.",
        "Attempt 2 was started by worker worker-2:9 at T: DataError: too long.",
        "Attempt 3 was started by worker worker-3:9 at T",
    ]
    assert [(one["attempt"], one["error"]) for one in run["failed_attempts"]] == list(enumerate(errors, start=1))
    assert run["result"] == {"deleted": 3, "earlier": [{"deleted": 1}, {"deleted": 2}]}


def test_a_failure_says_when_it_is_tried_again_and_what_the_error_was(story):
    JobRun.fail(started(claimed()), "OperationalError: [Errno 111] refused [/tmp]", delay=HOUR)

    assert story()[-1] == (
        f"It has failed 1 time(s), and waits for its retry at {written(JobRun.select_newest_first(NAME).first().retry_at)}."
        " The last error was: OperationalError: [Errno 111] refused [/tmp]."
    )


def test_a_run_that_was_cut_short_says_why(story):
    JobRun.succeed(begun(), {"deleted": 100, "stopped": "stopped", "braked": "stopped"})

    told = story()[-1]

    assert told.startswith("It ended before its work was done after ")
    assert ", because the batch was stopped: braked=stopped deleted=100" in told


def test_a_run_that_held_its_batch_has_the_sentence_with_the_numbers_and_what_holds_it(story):
    run = begun()
    sentence = "900 of 1,000 statuses would go"
    JobRun.hold(run, {"skipped": "held", "held": sentence}, kind="breaker", sentence=sentence, by="a worker")

    *_, of_the_run, of_now = story()

    assert of_the_run == f"The circuit breaker held it: {sentence}."
    assert of_now.startswith(f"{NAME} has been held since ")


def test_a_run_that_waits_while_its_batch_is_stopped_says_so(story):
    number = JobRun.claim_manual(NAME, by="ops:1")
    stop()

    asked, waits, told = story()

    assert asked.startswith(f"Run {number} was requested by hand, by ops:1 at ")
    assert waits == "It waits for a worker."
    assert told.startswith(f"{NAME} has been stopped by alice@host since ")
    assert told.endswith(f"(wrong rows go): `forgekeeper resume {NAME} --by alice@host` ends the stop")


def test_a_cancelled_run_says_by_whom_and_why(story):
    manual_runs.cancel_run(JobRun.claim_manual(NAME, by="ops:1"), reason="not now", by="alice@host")

    *_, skipped, cancelled = story()

    assert skipped == "It was cancelled while it waited, and did not run."
    assert cancelled.startswith("It was cancelled by alice@host at ")
    assert cancelled.endswith(" (not now).")


def test_at_a_time_between_two_ticks_both_are_named(story):
    tick = minute()
    claimed(tick)

    assert story(tick + timedelta(seconds=30)) == [
        f"The batch was not due at {written(tick + timedelta(seconds=30))}.",
        f"Its schedule is * * * * *: it was due at {written(tick)} and again at {written(tick + MINUTE)}.",
    ]


def test_a_tick_that_was_set_aside_is_still_found_at_its_time(story):
    tick = now().replace(microsecond=0) + HOUR
    JobRun.record_ticks(NAME, [tick], "missed", by="sched-1:7")
    reconcile.correct_times(NAME)

    assert story(tick)[0] == (
        f"The tick of {tick.isoformat()} was claimed by scheduler sched-1:7 before its time, because "
        "PostgreSQL's clock was ahead. It was set aside, and runs again at its time."
    )


def fail(**options):
    JobRun.fail(run := begun(), ERROR, BEGUN, delay=timedelta(0), **({"retries": 0} | options))
    return run.id


def kill_thrice():
    """Let a run's worker fall silent three times: then it is given up."""
    run = begun()
    JobRun.update(result=BEGUN, losses=2).where(JobRun.id == run.id).execute()
    JobRun.reopen_lost(NAME, dead_after=timedelta(0))


def cancel():
    run = begun()
    manual_runs.cancel_run(run.id, reason="a test", by="test")
    JobRun.fail(run, ERROR, BEGUN, delay=timedelta(0), retries=0)


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (fail, ERROR),
        (kill_thrice, "killed; the worker was lost: "),
        (cancel, "cancelled; "),
        (lambda: JobRun.succeed(begun(), BEGUN | {"stopped": "stopped", "braked": "stopped"}), "stopped; "),
        (begun, "deleted=7"),
    ],
    ids=["failed", "killed", "cancelled", "stopped", "running"],
)
def test_a_run_that_did_not_come_to_its_end_is_not_drained(main, end, word):
    end()
    JobRun.update(result=BEGUN).where(JobRun.batch == NAME, JobRun.result.is_null()).execute()

    shown, (tick,) = main("ticks", NAME).stdout, main("ticks", NAME, "--json").json["ticks"]

    assert (word in shown, "drained" in shown + str(tick["result"])) == (True, False)


def test_an_earlier_attempt_that_failed_is_not_drained_either(main):
    number = fail(retries=25)
    JobRun.succeed(begun(), BEGUN | {"deleted": 9})

    (tick,) = main("ticks", NAME, "--json").json["ticks"]

    result = tick["result"]
    assert (tick["id"], result["stopped"], result["earlier"]) == (number, "drained", [{"deleted": 7, "batches": 1}])


@pytest.mark.parametrize("command", [["ticks", NAME], ["why", NAME], ["status"]])
def test_no_answer_is_written_as_python_writes_it(main, command):
    JobRun.succeed(begun(), {"deleted": 7, "flag": None, "on": True, "off": False, "kept": [{"why": "it's"}]})

    shown = " ".join(main(*command).stdout.split())

    assert not re.search(r"None|True|False|\[\{'", shown)
    assert 'kept=[{"why":"it\'s"}]' in shown


def test_why_tells_the_story_of_a_run_by_its_number(main):
    main("run", "prune")
    number = main("run", NAME, "--json").json["run"]
    main("run", NAME)

    told = main("why", str(number), "--json").json

    assert (told["batch"], told["run"]["id"]) == (NAME, number)
    assert told["story"][0].startswith(f"Run {number} was requested by hand")
