"""What becomes of a batch's ticks, one story each, by a clock of the database that the test sets."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from queue import SimpleQueue
from urllib.parse import quote

import peewee as pw
import pytest
import redis
from dramatiq import Message

import scheduler
from forgekeeper import database as db
from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, client, connect
from forgekeeper.embedded.waiting import wait_until
from forgekeeper.process.broker import broker
from forgekeeper.process.run_messages import RunMessages
from forgekeeper.runs import clock_ahead
from forgekeeper.runs import reconcile as runs
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import BY_PEOPLE, Hold
from forgekeeper.runs.ledger import MAX_LOSSES, MAX_RETRIES, JobRun
from forgekeeper.runs.plan import REMEMBERED
from scheduler import Loop
from tests.harness.ledger import start_run
from tests.harness.settings import settings_with

NAME = "user_status_cleanup"
BATCH = BATCHES[NAME]
QUEUE = f"{broker.namespace}:{BATCH.queue}"
DAWN = datetime(2026, 3, 1, 11, 59, 30, tzinfo=UTC)
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DEAD_AFTER = timedelta(seconds=15)
LIMIT = 60.0

FAKE_CLOCK = """
    drop schema if exists fake cascade;
    create schema fake;
    create unlogged table fake.clock (at timestamptz);
    insert into fake.clock values ('2026-03-01 11:59:30+00');
    create function fake.clock_timestamp() returns timestamptz language sql volatile as 'select at from fake.clock';
"""


@pytest.fixture(autouse=True)
def ledger(_migrated, urls):
    """An empty ledger that has known the batch since dawn, read by the test's clock."""
    with connected(urls, search_path="public"):
        db.database.execute_sql("truncate job_runs, batches, holds restart identity")
        db.database.execute_sql(FAKE_CLOCK)
        client.flushdb()
    with connected(urls, search_path="fake,public,pg_catalog") as settings:
        Batch.insert(name=NAME, registered_at=DAWN).execute()
        yield settings
    with connected(urls, search_path="public"):
        db.database.execute_sql("drop schema fake cascade")


@contextmanager
def connected(urls, search_path):
    url = urls.database + ("&" if "?" in urls.database else "?") + "options=" + quote(f"-c search_path={search_path}")
    settings = settings_with(database_url=url, redis_url=urls.redis)
    connect(settings, Limits.of_worker(settings), name="tests", connections=20)
    db.database.connect()
    yield settings
    db.database.close_all()
    client.connection_pool.disconnect()


def clock_is(instant):
    db.database.execute_sql("update fake.clock set at = %s", (instant,))


def time_passes(duration):
    clock_is(db.now() + duration)


def reconcile(by="A", due_hint=None, **settings):
    runs.reconcile(NAME, settings_with(**settings), RunMessages(BATCH), by=by, due_hint=due_hint)


def at(instant, by="A", **settings):
    clock_is(instant)
    reconcile(by, **settings)


def row(tick=NOON):
    return JobRun.get(JobRun.tick == tick)


def rows(state):
    return {run.tick for run in JobRun.select().where(JobRun.state == state)}


def sent():
    return [int(name) for name in client.lrange(QUEUE, 0, -1)]


def fetch():
    """Take the next message as Dramatiq does."""
    (body,) = broker.do_fetch(BATCH.queue, 1)
    return Message.decode(body)


def start(tick=NOON):
    return start_run(NAME, row(tick).id, by="worker")


def executed(tick=NOON):
    """Run the tick from its message to the acknowledgement."""
    message = fetch()
    assert JobRun.succeed(start(tick), {})
    broker.do_ack(BATCH.queue, message.message_id)


def failed(tick=NOON, delay=MINUTE * 30):
    """Let the tick's first attempt fail; its retry waits."""
    message = fetch()
    assert JobRun.fail(start(tick), "Oops", delay=delay) == "enqueued"
    broker.do_ack(BATCH.queue, message.message_id)


# Ticks


def test_what_was_due_before_the_batch_was_known_is_not_run():
    at(DAWN + 29 * SECOND)

    assert not JobRun.select().exists()


def test_a_batch_that_nobody_has_registered_is_known_from_its_first_reconcile_on():
    Batch.delete().execute()

    reconcile()

    assert Batch.select().where(Batch.name == NAME).exists()
    assert not JobRun.select().exists()


def test_the_first_tick_is_claimed_and_sent():
    at(NOON)

    assert row().state == "enqueued"
    assert sent() == [row().id]


def test_a_tick_is_claimed_and_sent_once_by_schedulers_that_fire_together():
    clock_is(NOON)
    together = threading.Barrier(6)

    def fire(by):
        with db.database.connection_context():
            together.wait()
            reconcile(by=by)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(fire, "ABCDEF"))

    assert JobRun.select().count() == 1
    assert sent() == [row().id]


def test_a_reconcile_that_finds_nothing_to_do_changes_nothing():
    at(NOON)
    before = list(JobRun.select().dicts())

    at(NOON + SECOND, by="B")

    assert list(JobRun.select().dicts()) == before
    assert len(sent()) == 1


def test_a_scheduler_whose_clock_is_two_seconds_fast_is_believed():
    clock_is(NOON - 2 * SECOND)

    reconcile(due_hint=NOON)

    assert rows("enqueued") == {NOON}


def test_a_scheduler_whose_clock_is_three_seconds_fast_is_not_believed():
    clock_is(NOON - 3 * SECOND)

    reconcile(due_hint=NOON)

    assert not JobRun.select().exists()


# The database's clock was a day ahead, and is set right

TOMORROW = NOON + 24 * HOUR


def test_a_clock_that_was_ahead_holds_no_tick_back_once_it_is_right():
    at(TOMORROW)
    executed(TOMORROW)

    at(NOON)

    assert row(NOON).state == "enqueued"
    assert sent() == [row(NOON).id]


def test_a_tick_that_was_run_too_early_runs_again_when_its_time_comes():
    at(TOMORROW)
    executed(TOMORROW)
    at(NOON)
    executed(NOON)

    at(TOMORROW)

    assert row(TOMORROW).state == "enqueued"


def test_a_row_whose_tick_was_set_aside_remembers_it_and_ended_before_now():
    at(TOMORROW)
    early = row(TOMORROW).id
    executed(TOMORROW)

    at(NOON)

    aside = JobRun.get_by_id(early)
    assert (aside.state, aside.tick, aside.result) == ("succeeded", None, {"set_aside": TOMORROW.isoformat()})
    assert aside.finished_at == NOON
    assert JobRun.health(NAME).last_success == NOON


def test_a_tick_that_was_set_aside_is_told_of_for_an_hour():
    at(TOMORROW)
    executed(TOMORROW)
    before = clock_ahead.ahead(NAME)
    at(NOON)
    set_aside = clock_ahead.ahead(NAME)
    clock_is(NOON + HOUR)

    assert (before.ticks, set_aside, clock_ahead.ahead(NAME).ticks) == (0, (1 + REMEMBERED, TOMORROW), 0)


def test_a_tick_whose_time_has_not_come_is_told_of_before_any_scheduler_has_looked():
    at(TOMORROW)
    executed(TOMORROW)

    clock_is(NOON)

    assert clock_ahead.ahead(NAME) == (1 + REMEMBERED, TOMORROW)
    assert JobRun.newest_tick(NAME) is None


@pytest.mark.parametrize(("early", "ticks"), [(2 * SECOND, 0), (2 * SECOND + MICROSECOND, 1)])
def test_a_clock_set_back_by_no_more_than_the_tolerance_sets_nothing_aside(early, ticks):
    at(NOON)
    executed(NOON)

    at(NOON - early)

    assert clock_ahead.ahead(NAME).ticks == ticks


def test_the_run_of_a_worker_that_died_while_the_clock_was_ahead_is_taken_as_soon_as_any():
    at(TOMORROW)
    start(TOMORROW)

    at(NOON)
    at(NOON + DEAD_AFTER + SECOND)

    assert (row(TOMORROW).state, row(TOMORROW).reason) == ("enqueued", "worker_lost")


def test_a_worker_that_lives_keeps_its_run_when_the_clock_is_set_right():
    at(TOMORROW)
    run = start(TOMORROW)

    at(NOON)
    time_passes(DEAD_AFTER)
    alive = JobRun.keep_alive([run])
    reconcile()

    assert alive == {run.id}
    assert JobRun.succeed(run, {})


def test_a_retry_of_a_tick_to_come_gives_way_to_the_tick_that_is_due():
    at(TOMORROW)
    assert JobRun.fail(start(TOMORROW), "too early", delay=MINUTE) == "enqueued"

    at(NOON)

    assert rows("enqueued") == {NOON}
    assert JobRun.get(JobRun.reason == "superseded")


def test_a_retry_of_a_run_by_hand_does_not_wait_for_a_time_that_only_a_wrong_clock_knew():
    clock_is(TOMORROW)
    run = start_run(NAME, JobRun.claim_manual(NAME, by="A"), by="worker")
    JobRun.fail(run, "too early", delay=MINUTE)

    at(DAWN)
    at(DAWN + SECOND)

    assert JobRun.get_by_id(run.id).retry_at == DAWN
    assert sent() == [run.id]


def test_a_batch_registered_and_paused_while_the_clock_was_ahead_is_not_new_for_a_day():
    Batch.update(registered_at=TOMORROW).execute()
    Hold.insert(batch=NAME, kind="pause", by="me", since=TOMORROW, until=DAWN).execute()

    at(NOON)
    at(NOON + MINUTE)

    assert (Batch.get().registered_at, Hold.get().since) == (NOON, NOON)
    assert rows("enqueued") == {NOON + MINUTE}


def test_a_ledger_whose_times_are_right_is_left_as_it_is():
    at(NOON)
    executed(NOON)
    start_run(NAME, JobRun.claim_manual(NAME, by="A"), by="worker")
    before = list(JobRun.select().dicts())

    aside = clock_ahead.set_right(NAME)

    assert aside.ticks == 0
    assert list(JobRun.select().dicts()) == before


@pytest.mark.parametrize(("early", "claimed"), [(SECOND, True), (2 * SECOND, True), (3 * SECOND, False)])
def test_the_ledger_itself_turns_a_claim_away_that_comes_too_early(early, claimed):
    clock_is(NOON - early)

    claimed_id = JobRun.claim(NAME, NOON, by="A", reason=None)

    assert (claimed_id is not None) is claimed


def test_a_batch_that_is_off_claims_nothing():
    at(NOON, cron_user_status_cleanup="off")

    assert not JobRun.select().exists()


def test_a_tick_that_comes_while_the_batch_runs_is_skipped_as_an_overlap():
    at(NOON)
    run = start()
    time_passes(MINUTE)
    JobRun.keep_alive([run])

    reconcile()

    assert (row(NOON + MINUTE).state, row(NOON + MINUTE).reason) == ("skipped", "overlap")
    assert row().state == "started"


def test_a_tick_that_comes_while_the_last_one_waits_for_a_worker_is_skipped_as_an_overlap():
    at(NOON)

    at(NOON + MINUTE)

    assert (row(NOON + MINUTE).state, row(NOON + MINUTE).reason) == ("skipped", "overlap")
    assert sent() == [row().id]


# Pauses


def test_a_tick_that_comes_during_a_pause_is_skipped():
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    at(NOON)

    assert (row().state, row().reason) == ("skipped", "paused")
    assert not sent()


def test_a_run_that_was_sent_before_the_pause_is_not_started():
    at(NOON)
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    assert start() is None
    assert row().state == "enqueued"


def test_a_run_that_was_sent_before_the_pause_runs_after_it():
    at(NOON)
    Hold.add(NAME, "pause", until=None, reason=None, by="me")
    broker.do_ack(BATCH.queue, fetch().message_id)
    reconcile()
    assert not sent()
    Hold.lift(NAME, BY_PEOPLE)

    at(NOON + SECOND)

    assert sent() == [row().id]
    assert start() is not None


def test_a_pause_ends_by_itself():
    Hold.add(NAME, "pause", until=NOON + MINUTE, reason=None, by="me")
    at(NOON)

    at(NOON + MINUTE)

    assert rows("enqueued") == {NOON + MINUTE}


def test_an_emptied_redis_does_not_resume_a_paused_batch():
    at(NOON)
    Hold.add(NAME, "pause", until=None, reason=None, by="me")
    client.flushall()

    at(NOON + MINUTE)

    assert not sent()
    assert start() is None


# Outages


def test_after_an_outage_the_newest_tick_is_caught_up_and_the_older_ones_are_coalesced():
    at(NOON + timedelta(minutes=3, seconds=1), cron_user_status_cleanup="0-2 * * * *")

    assert (row(NOON + 2 * MINUTE).state, row(NOON + 2 * MINUTE).reason) == ("enqueued", "catch_up")
    assert rows("coalesced") == {NOON, NOON + MINUTE}


def test_ticks_outside_the_window_are_missed():
    at(NOON + 10 * MINUTE, catch_up_window="120")

    assert rows("enqueued") == {NOON + 10 * MINUTE}
    assert rows("coalesced") == {NOON + 9 * MINUTE}
    assert rows("missed") == {NOON + minutes * MINUTE for minutes in range(9)}


def test_a_late_tick_is_missed_where_catching_up_is_switched_off():
    at(NOON + 2 * MINUTE, cron_user_status_cleanup="0 * * * *", catch_up_user_status_cleanup="skip")

    assert rows("missed") == {NOON}
    assert not sent()


# Sending


def test_a_message_is_sent_again_after_redis_was_emptied():
    at(NOON)
    client.flushall()

    at(NOON + SECOND, by="B")

    assert sent() == [row().id]


def test_a_message_that_a_worker_holds_is_not_sent_again():
    at(NOON)
    fetch()

    at(NOON + SECOND, by="B")

    assert not sent()


def test_what_a_scheduler_claimed_before_it_died_is_sent_by_the_next(monkeypatch):
    clock_is(NOON)
    with dying_before(monkeypatch, runs, "send"):
        reconcile()
    assert row().state == "claimed"

    at(NOON + SECOND, by="B")

    assert row().state == "enqueued"
    assert sent() == [row().id]


def test_for_a_second_a_run_is_its_claimants_to_send():
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)

    at(NOON + SECOND - MICROSECOND, by="B")

    assert (row().state, sent()) == ("claimed", [])


def test_for_a_second_nobody_sends_again_what_was_sent():
    at(NOON)
    client.flushall()

    at(NOON + SECOND - MICROSECOND)

    assert sent() == []


def test_a_scheduler_that_was_stopped_does_not_send_what_has_run_meanwhile(monkeypatch):
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)
    looks = count()

    def stopped():
        if (look := next(looks)) == 1:
            JobRun.succeed(start(), {})
        return look * 2

    monkeypatch.setattr(runs, "monotonic", stopped)
    reconcile()

    assert (row().state, sent()) == ("succeeded", [])


def test_a_scheduler_that_waits_long_for_each_answer_sends_all_the_same(monkeypatch):
    monkeypatch.setattr(runs, "monotonic", count(step=2).__next__)

    at(NOON)

    assert sent() == [row().id]


def test_a_run_claimed_by_a_clock_that_was_set_back_since_is_sent_by_anyone():
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)

    at(NOON - SECOND, by="B")

    assert sent() == [row().id]


def test_what_a_scheduler_sent_before_it_died_is_not_sent_twice(monkeypatch):
    clock_is(NOON)
    with dying_before(monkeypatch, JobRun, "mark_enqueued"):
        reconcile()
    assert row().state == "claimed"

    at(NOON + SECOND, by="B")

    assert row().state == "enqueued"
    assert sent() == [row().id]


@contextmanager
def dying_before(monkeypatch, where, name):
    """Let the process die before its next step, in the one way a test can survive."""

    class Death(BaseException):
        pass

    def die(*_arguments, **_options):
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):  # noqa: PT012, the caller's one statement is the act
        patch.setattr(where, name, die)
        yield


def test_a_worker_may_start_a_run_that_its_scheduler_has_not_marked_as_sent():
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)
    run = start()

    JobRun.mark_enqueued(JobRun.get_by_id(run.id))

    assert row().state == "started"


def test_a_message_of_another_batch_starts_no_run():
    at(NOON)

    assert start_run("stale_imports", row().id, by="worker") is None
    assert row().state == "enqueued"


def test_a_run_whose_message_is_a_dead_letter_is_given_up():
    at(NOON)
    broker.do_nack(BATCH.queue, fetch().message_id)

    reconcile()

    assert (row().state, row().reason) == ("failed", "dead_lettered")


def test_the_batch_goes_on_after_a_dead_letter():
    at(NOON)
    broker.do_nack(BATCH.queue, fetch().message_id)
    reconcile()

    at(NOON + MINUTE)

    assert rows("enqueued") == {NOON + MINUTE}


def test_a_run_that_somebody_started_meanwhile_is_not_given_up_for_its_dead_letter():
    at(NOON)
    run = start()

    assert not JobRun.give_up(JobRun.get_by_id(run.id), reason="dead_lettered")

    assert row().state == "started"


# Retries


def test_a_retry_waits_its_time():
    at(NOON, cron_user_status_cleanup="0 * * * *")
    failed(delay=MINUTE)

    at(NOON + MINUTE - SECOND, cron_user_status_cleanup="0 * * * *")
    assert not sent()

    at(NOON + MINUTE, cron_user_status_cleanup="0 * * * *")
    assert sent() == [row().id]


def test_a_waiting_retry_gives_way_to_a_newer_tick():
    at(NOON)
    failed()

    at(NOON + MINUTE)

    assert (row().state, row().reason) == ("failed", "superseded")
    assert rows("enqueued") == {NOON + MINUTE}


def test_a_waiting_retry_of_a_run_by_hand_gives_way_to_a_tick():
    run = JobRun.start_here(NAME, by="me")
    JobRun.fail(run, "Oops", delay=MINUTE)

    at(NOON)

    assert JobRun.get_by_id(run.id).reason == "superseded"
    assert rows("enqueued") == {NOON}


def test_a_waiting_retry_does_not_give_way_to_its_own_tick():
    at(NOON)
    failed()

    assert JobRun.claim(NAME, NOON, by="B", reason=None) is None

    assert (row().state, row().reason) == ("enqueued", "error")


def test_a_waiting_retry_does_not_give_way_to_an_older_tick():
    at(NOON)
    failed()

    assert JobRun.claim(NAME, NOON - MINUTE, by="B", reason=None) is None

    assert (row().state, row().reason) == ("enqueued", "error")


def test_a_waiting_retry_keeps_its_place_when_a_pause_turns_the_newer_tick_away():
    at(NOON)
    failed()
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    at(NOON + MINUTE)

    assert (row().state, row().reason) == ("enqueued", "error")
    assert rows("skipped") == {NOON + MINUTE}


def test_the_failure_after_the_last_retry_is_final():
    at(NOON)
    for _ in range(MAX_RETRIES):
        assert JobRun.fail(start(), "Oops", delay=timedelta(0)) == "enqueued"

    assert JobRun.fail(start(), "Oops", delay=timedelta(0)) == "failed"

    assert (row().state, row().failures, row().retry_at) == ("failed", MAX_RETRIES + 1, None)


# Lost workers


def test_a_run_whose_worker_is_silent_for_just_as_long_as_allowed_stays_its_own():
    at(NOON)
    start()

    at(NOON + DEAD_AFTER)

    assert row().state == "started"


def test_a_run_whose_worker_fell_silent_is_reopened():
    at(NOON)
    start()

    at(NOON + DEAD_AFTER + SECOND)

    assert (row().state, row().reason, row().losses) == ("enqueued", "worker_lost", 1)


def test_a_run_whose_worker_gives_signs_of_life_stays_its_own():
    at(NOON)
    run = start()
    time_passes(DEAD_AFTER - SECOND)
    assert JobRun.keep_alive([run]) == {run.id}

    at(NOON + DEAD_AFTER + SECOND)

    assert row().state == "started"


def test_signs_of_life_are_given_for_all_runs_that_the_heart_names():
    at(NOON)
    run = start()

    assert JobRun.keep_alive(named for named in [run]) == {run.id}


def test_a_run_that_has_taken_three_workers_down_is_poison():
    at(NOON, cron_user_status_cleanup="0 * * * *")
    for _ in range(MAX_LOSSES):
        start()
        time_passes(DEAD_AFTER + SECOND)
        reconcile(cron_user_status_cleanup="0 * * * *")

    assert (row().state, row().reason, row().losses) == ("failed", "poison", MAX_LOSSES)
    assert row().finished_at is not None


ACTS = [
    lambda late: JobRun.succeed(late, {}),
    lambda late: JobRun.block(late, {}, reason="clocks", sentence="they differ"),
    lambda late: JobRun.fail(late, "Oops", delay=MINUTE),
    lambda late: JobRun.keep_alive([late]),
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("batch", [NAME, "prune"])
def test_an_attempt_of_a_lost_time_changes_no_run_that_has_its_number_since(act, batch):
    at(NOON)
    late = start()
    JobRun.delete().execute()
    JobRun.insert(id=late.id, batch=batch, state="claimed", tick=NOON).execute()
    assert start_run(batch, late.id).attempt == late.attempt
    before = JobRun.select().dicts().get()

    assert not act(late)

    assert JobRun.select().dicts().get() == before


def test_a_dead_letter_of_a_lost_time_ends_no_run_that_has_its_number_since():
    at(NOON)
    lost = row().id
    broker.do_nack(BATCH.queue, fetch().message_id)
    JobRun.delete().execute()
    JobRun.insert(id=lost, batch=NAME, state="claimed", tick=NOON, claimed_at=NOON, claimed_by="A").execute()

    reconcile()

    assert (row().state, sent()) == ("enqueued", [lost])


@pytest.mark.parametrize("change", [JobRun.mark_enqueued, lambda seen: JobRun.give_up(seen, reason="dead_lettered")])
def test_a_scheduler_that_has_looked_before_the_database_came_back_changes_no_run_of_the_number(change):
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)
    seen = row()
    JobRun.delete().execute()
    JobRun.insert(id=seen.id, batch=NAME, state="claimed", tick=NOON).execute()
    before = JobRun.select().dicts().get()

    change(seen)

    assert JobRun.select().dicts().get() == before


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_an_attempt_that_comes_back_after_its_run_was_taken_changes_nothing(act, restarted):
    at(NOON)
    late = start()
    at(NOON + DEAD_AFTER + SECOND)
    if restarted:
        start()
    before = JobRun.select().dicts().get()

    assert not act(late)

    assert JobRun.select().dicts().get() == before


def test_a_message_that_comes_twice_starts_one_attempt():
    at(NOON)
    assert start() is not None

    assert start() is None


def test_a_message_that_comes_after_its_run_has_ended_starts_nothing():
    at(NOON)
    executed()

    assert start() is None


# Runs by hand


def test_a_run_by_hand_holds_the_batch():
    assert JobRun.claim_manual(NAME, by="me") is not None

    at(NOON)

    assert (row().state, row().reason) == ("skipped", "overlap")


def test_a_second_run_by_hand_is_refused_while_the_first_is_open():
    JobRun.claim_manual(NAME, by="me")

    assert JobRun.claim_manual(NAME, by="you") is None


def test_a_run_here_takes_over_the_tick_that_waits():
    at(NOON)

    run = JobRun.start_here(NAME, by="me")

    assert run.id == row().id
    assert row().started_by == "me"


def test_a_run_here_is_refused_while_the_batch_runs():
    JobRun.start_here(NAME, by="me")

    assert JobRun.start_here(NAME, by="you") is None


def test_a_run_here_is_refused_while_the_batch_is_paused():
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    assert JobRun.start_here(NAME, by="me") is None


# The loop around it


@pytest.fixture
def patient(ledger):
    """Settings under which a loop turns when it is woken, and not within the test without."""
    return ledger.model_copy(update={"poll_interval": HOUR})


@pytest.fixture
def loops():
    """Make loops that are stopped in the end."""
    made = []

    def make(batch, settings):
        made.append(Loop(batch, settings, broken=threading.Event(), asked=SimpleQueue()))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()
        if loop.ident:
            loop.join()


def test_a_loop_reconciles_when_it_is_woken(loops, patient, monkeypatch):
    turned, in_order = threading.Event(), scheduler.reconcile

    def turn(*arguments, **facts):
        in_order(*arguments, **facts)
        turned.set()

    monkeypatch.setattr(scheduler, "reconcile", turn)
    loop = loops(BATCH, patient)
    loop.start()
    # Its first turn is through: until then it might see noon without being woken.
    assert turned.wait(LIMIT)
    clock_is(NOON)

    loop.wake()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)


def test_a_loop_that_is_stopped_lets_the_process_live(loops, patient):
    loop = loops(BATCH, patient)
    loop.start()

    loop.stop()
    loop.join(LIMIT)

    assert not loop.is_alive()
    assert loop._asked.empty()
    assert not loop._broken.is_set()


def test_a_turn_without_redis_claims_the_tick_and_the_next_turn_sends_it(loops, patient):
    loop, pool = loops(BATCH, patient), client.connection_pool
    clock_is(NOON)
    client.connection_pool = redis.ConnectionPool.from_url("redis://127.0.0.1:1")
    loop.turn()
    client.connection_pool = pool
    db.database.connect(reuse_if_open=True)
    assert row().state == "claimed"

    loop.turn()

    assert sent() == [row().id]


def test_a_turn_survives_a_database_that_breaks_its_connection(loops, patient):
    loop = loops(BATCH, patient)
    clock_is(NOON)
    with pytest.raises(pw.OperationalError):
        db.database.execute_sql("select pg_terminate_backend(pg_backend_pid())")
    loop.turn()

    loop.turn()

    assert rows("enqueued") == {NOON}


def test_a_loop_one_of_whose_turns_fails_for_any_reason_turns_again(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "AGAIN", 0.0)
    errors, in_order = iter([MemoryError, RuntimeError]), scheduler.reconcile

    def spoilt(*arguments, **facts):
        for error in errors:
            raise error
        in_order(*arguments, **facts)

    monkeypatch.setattr(scheduler, "reconcile", spoilt)
    loop = loops(BATCH, patient)
    clock_is(NOON)

    loop.start()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)
    assert not loop._broken.is_set()


def test_a_loop_that_breaks_ends_the_process(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "AGAIN", 0.0)

    def broken(*_arguments, **_facts):
        raise TypeError

    monkeypatch.setattr(scheduler, "reconcile", broken)
    loop = loops(BATCH, patient)

    loop.start()
    loop.join(LIMIT)

    assert not loop._asked.empty()
    assert loop._broken.is_set()
