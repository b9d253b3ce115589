"""What a child may expect of its retries is what Dramatiq's own retries promise, on our broker and a real Redis.

Dramatiq's tests of them do not come with its source; what they ask for is asked for here in our words.  One thing is not
ours: an age after which a message is not tried again, for our broker has no `AgeLimit`.
"""

import logging
import time
from types import SimpleNamespace

import dramatiq
import pytest
import redis
from dramatiq.common import current_millis
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage

from forgekeeper.delivery.queues import depth
from forgekeeper.process.attempts import ChildRetries
from tests.harness.waiting import wait_until

from .dramatiq_fixtures import AllChildren, Options, worker

LIMIT = 60.0
LONG = 100_000
"""Milliseconds that no test waits for."""
SOON = {"min_backoff": 10, "max_backoff": 20}


@pytest.fixture
def broker(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        retries = ChildRetries(max_retries=20, min_backoff=LONG, max_backoff=LONG)
        yield AllChildren(client=client, namespace="retries", middleware=[Options(), retries, CurrentMessage()])


@pytest.fixture
def child(broker):
    """Declare a child that notes when it is tried, and when it was sent again; it fails until so many tries are over."""

    def declare(*, fails=1_000, error=RuntimeError, **options):
        seen = SimpleNamespace(tries=[], sent_again=[])

        @dramatiq.actor(broker=broker, actor_name="child", **options)
        def work(*args):
            seen.tries.append(time.monotonic())
            seen.sent_again.append(CurrentMessage.get_current_message().options.get("requeue_timestamp"))
            if len(seen.tries) <= fails:
                raise error(*args)

        seen.send = work.send
        seen.send_with_options = work.send_with_options
        return seen

    return declare


@pytest.fixture
def finish(broker):
    """Work until nothing is left; return what is dead."""

    def run():
        with worker(broker, worker_threads=2, worker_timeout=10):
            assert wait_until(lambda: not any(map(left, broker.queues)), LIMIT)
        return depth(broker.client, "retries", "default")["dead"]

    def left(queue):
        counts = depth(broker.client, "retries", queue)
        return counts["ready"] + counts["in_flight"] + counts["delayed"]

    return run


def test_a_child_that_has_failed_is_tried_again_until_it_succeeds(child, finish):
    work = child(fails=2, **SOON)
    work.send()

    dead = finish()

    assert (len(work.tries), dead) == (3, 0)


def test_a_child_is_tried_again_so_many_times_and_is_dead_then(child, finish):
    work = child(max_retries=3, **SOON)
    work.send()

    dead = finish()

    assert (len(work.tries), dead) == (4, 1)


@pytest.mark.parametrize("retries", [0, 4])
def test_a_message_may_say_how_often_it_is_tried_again(child, finish, retries):
    work = child(max_retries=99)
    work.send_with_options(max_retries=retries, **SOON)

    dead = finish()

    assert (len(work.tries), dead) == (1 + retries, 1)


@pytest.mark.parametrize("whose", ["actor", "message"])
@pytest.mark.parametrize("backoff", ["min_backoff", "max_backoff"])
def test_without_a_pause_a_child_is_tried_again_at_once(child, finish, whose, backoff):
    none = {backoff: 0}
    work = child(max_retries=10, **(none if whose == "actor" else {}))
    work.send_with_options(**(none if whose == "message" else {}))

    finish()

    assert len(work.tries) == 11


def test_a_child_that_asks_for_another_try_waits_as_long_as_it_says(child, finish):
    work = child(fails=1, error=lambda: Retry(delay=300))
    work.send()

    finish()

    assert 0.3 <= work.tries[1] - work.tries[0] < LONG / 1000


def test_asking_for_another_try_is_no_error_in_the_log(child, finish, caplog):
    work = child(max_retries=0, error=Retry)
    work.send()

    with caplog.at_level(logging.INFO):
        finish()

    assert [record for record in caplog.records if record.name.startswith("dramatiq") and record.levelno > 30] == []


def test_what_the_actor_expects_to_be_raised_is_not_tried_again_and_no_error_in_the_log(child, finish, caplog):
    work = child(throws=(KeyError, ValueError), error=ValueError, **SOON)
    work.send()

    with caplog.at_level(logging.INFO):
        finish()

    assert len(work.tries) == 1
    assert [record for record in caplog.records if record.name.startswith("dramatiq") and record.levelno > 20] == []


@pytest.mark.parametrize(("error", "tries"), [(ValueError, 1), (RuntimeError, 4)])
def test_an_actor_may_decide_after_which_error_it_is_tried_again(child, finish, error, tries):
    def again(count, exception):
        return count < 3 and isinstance(exception, RuntimeError)

    work = child(retry_when=again, max_retries=0, error=error, **SOON)
    work.send()

    finish()

    assert len(work.tries) == tries


def test_a_retry_says_when_it_was_sent_again(child, finish):
    work = child(max_retries=2, **SOON)
    before = current_millis()
    work.send()

    finish()

    first, second, third = work.sent_again
    assert first is None
    assert before <= second < third


@pytest.mark.parametrize(("fails", "told"), [(0, 0), (1, 0), (1_000, 1)])
def test_another_actor_is_told_once_all_tries_have_failed_and_not_before(broker, child, finish, fails, told):
    heard = []
    dramatiq.actor(lambda *args: heard.append(args), broker=broker, actor_name="told")
    work = child(fails=fails, error=lambda: Retry(delay=1), max_retries=2, on_retry_exhausted="told")
    work.send()

    finish()

    assert len(work.tries) == min(fails, 2) + 1
    assert len(heard) == told
