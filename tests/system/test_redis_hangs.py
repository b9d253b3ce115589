"""A Redis that takes connections and never answers: how long a sender is held up, and that schedulers and workers go on."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from math import inf

from forgekeeper.batches import BATCHES
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until

from .proxy import redis_through
from .service import ROOT

CAP = 30.0
HELD_UP = 4.5
"""Seconds that `forgekeeper send` may take: two are promised, and it has to end, too."""
TIMES = 3
"""A busy machine may be late, but not every time."""
BEHIND = timedelta(seconds=10)
"""How far a scheduler's ledger may lag: the turn of a batch waits for Redis once, and the machine may be busy."""
BATCH = "user_status_cleanup"
OPTIONS = {f"cron_{batch}": "off" for batch in BATCHES}
OPTIONS |= {f"cron_{BATCH}": "* * * * * *", "poll_interval": "0.5", "redis_timeout": "1", "dead_after": "3"}


def seconds_to_send(url):
    """Return how long `forgekeeper send` takes from its first word to Redis to its end."""
    proxy, through = redis_through(url)
    with proxy:
        proxy.black_hole()
        command = subprocess.Popen(
            [sys.executable, "-m", "forgekeeper.cli", "send", "stale_imports"],
            cwd=ROOT,
            env={**os.environ, f"{PREFIX}REDIS_URL": through},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert wait_until(lambda: proxy.connections, CAP)
        asked_at = time.monotonic()
        _, said = command.communicate(timeout=CAP)
        seconds = time.monotonic() - asked_at
    assert (command.returncode, "cannot use Redis" in said) == (1, True), said
    return seconds


def succeeded(since):
    """Say whether a run has succeeded that began after that moment."""
    return JobRun.select().where(JobRun.batch == BATCH, JobRun.state == "succeeded", JobRun.started_at > since).exists()


def test_a_black_hole_holds_senders_up_for_seconds_and_runs_go_on_afterwards(database, services, urls, outcome, say):
    began = now()
    proxy, through = redis_through(urls.redis)
    with proxy:
        scheduler = services("scheduler", "scheduler", redis_url=through, **OPTIONS)
        services("worker", "worker", "--processes", "1", "--threads", "2", redis_url=through, **OPTIONS)
        assert wait_until(lambda: succeeded(began), CAP)

        proxy.black_hole()
        held_up = min(seconds_to_send(urls.redis) for _ in range(TIMES))
        behind = now() - JobRun.newest_tick(BATCH)
        proxy.passing()
        back, back_at = now(), time.monotonic()
        seconds = time.monotonic() - back_at if wait_until(lambda: succeeded(back), CAP) else inf

    outcome(17, injected=1, violations=(held_up > HELD_UP) + (seconds == inf), recovery=[seconds])
    say(f"`send` was held up by a black hole for {held_up:.1f} s")
    assert held_up <= HELD_UP
    assert behind < BEHIND
    assert seconds < CAP
    assert scheduler.process.poll() is None
