"""Events for the operators' webhook: found in the database, recorded once, sent until a receiver accepts them."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import psycopg2
import pytest

from forgekeeper.ledger import operator_events
from forgekeeper.ledger.event_watch import EventWatch
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.operator_events import BacklogForecast, OperatorEvent
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now, release_connection
from forgekeeper.platform.webhook import Webhook
from models import UserStatus
from tests.harness.installation import INSTALLATION
from tests.harness.performing import start_run
from tests.harness.receivers import answer_with, run_receiver
from workers.user_status_cleanup import user_status_cleanup

NAME = user_status_cleanup.name
SECRET = "whsec_aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg=="
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
CALM = BacklogForecast(3, timedelta(0), 1.0, HOUR, MINUTE)
AT_RISK = BacklogForecast(100_000, 10 * MINUTE, 7200.0, HOUR, MINUTE)


@pytest.fixture
def receiver():
    with run_receiver() as server:
        yield server


@pytest.fixture
def watch(database, settings, receiver):
    """Watch once in a thread with a connection of its own, as an exporter does every few seconds."""
    watching = EventWatch(settings, Webhook(receiver.url, SECRET))

    def turn():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(watching.watch_once).result()

    return turn


def hold(sentence="it would delete 5,000 of 6,000 records"):
    started = start_run(NAME, JobRun.claim_manual(NAME, by="test"), by="test")
    JobRun.hold(started, {}, kind="breaker", sentence=sentence, by="test")


def received(receiver):
    return [json.loads(one.body) for one in receiver.requests]


def make_due():
    """Let the next attempt of every event be due."""
    OperatorEvent.update(next_try_at=now()).where(OperatorEvent.next_try_at.is_null(False)).execute()


# The breaker


def test_a_hold_of_the_breaker_is_an_event_with_its_reason(watch, receiver):
    hold()
    watch()

    (event,) = received(receiver)
    assert event["type"] == "batch.held"
    assert (
        event["data"].items()
        >= {
            "batch": NAME,
            "installation": INSTALLATION,
            "reason": "it would delete 5,000 of 6,000 records",
        }.items()
    )


def test_a_hold_is_one_event_while_it_lasts(watch, receiver):
    hold()
    for _ in range(3):
        watch()

    assert len(receiver.requests) == 1


def test_a_second_hold_is_a_second_event(watch, receiver):
    hold()
    watch()
    Hold.delete().execute()
    hold("again")
    watch()

    assert [event["data"]["reason"] for event in received(receiver)][1:] == ["again"]


@pytest.mark.parametrize("kind", ["pause", "stop", "new"])
def test_a_hold_by_a_person_or_of_a_new_batch_is_no_event(watch, receiver, kind):
    Hold.insert(batch=NAME, kind=kind, reason="R", by="me").execute()
    watch()

    assert receiver.requests == []


def test_a_hold_from_before_the_webhook_is_no_event(watch, receiver):
    Hold.insert(batch=NAME, kind="breaker", reason="R", by="me", since=now() - timedelta(days=2)).execute()
    watch()

    assert receiver.requests == []


# Backlogs


@pytest.mark.parametrize(
    ("forecast", "expected"),
    [
        (AT_RISK, True),
        (AT_RISK._replace(seconds_left=3000.0), False),
        (AT_RISK._replace(seconds_left=None), False),
        (AT_RISK._replace(seconds_left=None, waited=2 * HOUR), True),
        (AT_RISK._replace(seconds_left=0.5, waited=2 * HOUR), True),
        # The next tick may delete everything.
        (AT_RISK._replace(waited=2 * MINUTE), False),
        (AT_RISK._replace(waited=2 * HOUR, interval=24 * HOUR), False),
    ],
)
def test_an_objective_is_at_risk_if_a_tick_left_records_and_the_rate_is_too_low(forecast, expected):
    assert forecast.is_at_risk == expected


def test_a_backlog_at_risk_is_one_event_until_it_is_drained(database):
    for forecast in (CALM, AT_RISK, AT_RISK, AT_RISK._replace(seconds_left=60.0), CALM, CALM, AT_RISK):
        operator_events.record_forecast(NAME, forecast)

    kinds = [one.kind for one in OperatorEvent.select().order_by(OperatorEvent.id)]
    assert kinds == ["objective.at_risk", "backlog.drained", "objective.at_risk"]


def test_of_several_exporters_that_find_a_fact_one_records_it(database):
    def find():
        try:
            db.connect(reuse_if_open=True)
            operator_events.record_forecast(NAME, AT_RISK)
        finally:
            release_connection()

    with ThreadPoolExecutor(8) as pool:
        for found in [pool.submit(find) for _ in range(24)]:
            found.result()

    assert OperatorEvent.select().count() == 1


def late_statuses(count, *, waited):
    at = now()
    rows = [{"user_id": number, "message": "x", "clear_status_at": at - waited} for number in range(1, count + 1)]
    UserStatus.insert_many(rows).execute()


def deleted_in_the_last_hour(records):
    started = start_run(NAME, JobRun.claim_manual(NAME, by="test"), by="test")
    RunTotal.insert(batch=NAME, run=started.id, day=now().date(), records=records).execute()
    JobRun.succeed(started, {})
    earlier = {JobRun.started_at: now() - HOUR / 2, JobRun.finished_at: now()}
    JobRun.update(earlier).where(JobRun.id == started.id).execute()


def test_a_backlog_that_takes_longer_than_the_objective_is_an_event_before_it_is_missed(watch, receiver):
    late_statuses(50, waited=4 * MINUTE)
    deleted_in_the_last_hour(10)
    watch()

    (event,) = received(receiver)
    assert event["type"] == "objective.at_risk"
    assert event["data"].items() >= {"batch": NAME, "backlog": 50, "objective_seconds": 300, "missed": False}.items()
    assert event["data"]["seconds_left"] == pytest.approx(50 / (10 / 1800), rel=0.05)
    assert event["data"]["oldest_waited_seconds"] == pytest.approx(240, abs=30)


def test_a_backlog_that_is_deleted_after_that_is_drained(watch, receiver):
    late_statuses(50, waited=2 * HOUR)
    watch()
    UserStatus.delete().execute()
    watch()

    assert [event["type"] for event in received(receiver)] == ["objective.at_risk", "backlog.drained"]
    assert received(receiver)[-1]["data"]["backlog"] == 0


def test_a_backlog_of_a_paused_batch_is_no_event(watch, receiver):
    late_statuses(50, waited=2 * HOUR)
    Hold.insert(batch=NAME, kind="pause", reason="R", by="me").execute()
    watch()

    assert receiver.requests == []


# Delivery


def test_an_event_that_was_refused_is_sent_again_with_its_id_after_a_pause(watch, receiver):
    receiver.answer = answer_with(503)
    hold()
    watch()
    watch()
    assert len(receiver.requests) == 1
    receiver.answer = answer_with(204)
    make_due()
    watch()

    first, second = receiver.requests
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)
    assert OperatorEvent.get().delivered_at is not None


def test_the_pause_between_two_attempts_doubles_up_to_an_hour(database):
    OperatorEvent.insert(kind="k", batch=NAME, subject="1", detail={}).execute()
    pauses = []
    for _ in range(12):
        make_due()
        began = now()
        operator_events.claim_event()
        pauses.append(round((OperatorEvent.get().next_try_at - began).total_seconds()))

    assert pauses[:5] == [15, 30, 60, 120, 240]
    assert pauses[-1] == 3600


def test_a_claimed_event_is_claimed_by_nobody_else(database, urls):
    OperatorEvent.insert(kind="k", batch=NAME, subject="1", detail={}).execute()
    with closing(psycopg2.connect(urls.database)) as other, other.cursor() as cursor:
        cursor.execute("set search_path to forgekeeper")
        cursor.execute(operator_events.CLAIM_EVENT)
        assert cursor.fetchone() is not None

        assert operator_events.claim_event() is None
        other.commit()
        assert operator_events.claim_event() is None


def test_an_event_that_nobody_accepts_for_a_day_is_given_up(watch, receiver):
    receiver.answer = answer_with(500)
    hold()
    watch()
    OperatorEvent.update(at=now() - timedelta(days=2)).execute()
    make_due()
    watch()

    assert len(receiver.requests) == 1
    assert (OperatorEvent.get().next_try_at, OperatorEvent.get().delivered_at) == (None, None)


def test_old_events_are_deleted_but_for_the_newest_about_a_backlog(database):
    for number in range(3):
        for kind in ("batch.held", "objective.at_risk"):
            OperatorEvent.insert(kind=kind, batch=NAME, subject=str(number), detail={}).execute()
    OperatorEvent.update(at=now() - timedelta(days=31), next_try_at=None).execute()
    operator_events.delete_old_events()

    assert [(one.kind, one.subject) for one in OperatorEvent.select()] == [("objective.at_risk", "2")]
