"""Ticks every second while schedulers and workers are killed and Redis is emptied.

CHAOS_SECONDS sets how long; CHAOS_SEED repeats a schedule of faults (their effects
depend on timing all the same).
"""

import os
import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg2
import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from tests.harness.waiting import wait_until

DURATION = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
START = 60.0
RECOVERY = 30.0
FLUSH_EVERY = 15.0
SAMPLE_EVERY = 0.05
BACKLOG = 50
PACE = 60
"""Statuses a second: slow enough that most kills of a worker hit a run."""
DEAD_AFTER = timedelta(seconds=2)
SLACK = timedelta(seconds=0.25)
"""How late an ending may be in the log: its line is written after the row has changed."""

OPEN = {"claimed", "enqueued", "started"}
ENDINGS = {"run finished", "run failed", "run lost"}
FAULTS = {
    1: ("a worker process killed", "a worker with its master killed"),
    13: ("Redis emptied",),
    44: ("a scheduler killed", "all schedulers killed"),
}
"""Which faults of the matrix our kinds are."""
ENVIRONMENT = {f"cron_{batch}": "off" for batch in BATCHES} | {
    "cron_user_status_cleanup": "* * * * * *",
    "pace_user_status_cleanup": str(PACE),
    "dead_after": str(DEAD_AFTER.total_seconds()),
    "poll_interval": "0.5",
    "log_format": "json",
}


@dataclass
class Ledger(threading.Thread):
    """Looks at the ledger all the time and notes what must never be seen."""

    url: str
    rows: dict = field(default_factory=dict)
    signs: dict = field(default_factory=dict)
    wrong: list = field(default_factory=list)
    samples: int = 0

    def __post_init__(self):
        super().__init__(daemon=True)
        self._stopped = threading.Event()

    def __hash__(self):
        return id(self)

    def stop(self):
        self._stopped.set()
        self.join()

    def run(self):
        with closing(connect(self.url)) as connection:
            while not self._stopped.wait(SAMPLE_EVERY):
                self.sample(connection)

    def sample(self, connection):
        self.samples += 1
        seen = {row["id"]: row for row in rows(connection)}
        if missing := self.rows.keys() - seen.keys():
            self.wrong.append(f"rows vanished: {missing}")
        if sum(row["state"] in OPEN for row in seen.values()) > 1:
            self.wrong.append("two open rows")
        for run, before in self.rows.items():
            if before["state"] not in OPEN and before != seen.get(run):
                self.wrong.append(f"a closed row changed: {before} became {seen.get(run)}")
        self.signs |= {(row["id"], row["attempt"]): row["alive_at"] for row in seen.values()}
        self.rows = seen


def connect(url):
    connection = psycopg2.connect(url, options="-c timezone=UTC")
    connection.autocommit = True
    return connection


def ask(connection, sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall() if cursor.description else None


def rows(connection):
    columns = ("id", "tick", "state", "reason", "attempt", "losses", "started_at", "alive_at", "finished_at", "result")
    return [
        dict(zip(columns, row, strict=True)) for row in ask(connection, f"select {', '.join(columns)} from job_runs")
    ]


class Statuses:
    """Users whose status is due, and others whose status is not, more of each all the time."""

    def __init__(self, connection):
        self._connection = connection
        self.made = 0

    def keep_up(self):
        """Leave something to do, but never more than a run does in a second or two."""
        if self.count("due") >= BACKLOG:
            return
        ask(
            self._connection,
            """
            insert into user_statuses (user_id, clear_status_at)
            select number * 2 + kind, clock_timestamp() + case kind when 0 then '0 s' else '1 h'::interval end
            from generate_series(%s, %s) as number, generate_series(0, 1) as kind
            """,
            self.made,
            self.made + BACKLOG - 1,
        )
        self.made += BACKLOG

    def count(self, kind):
        sql = "select count(*) from user_statuses where user_id %% 2 = %s"
        return ask(self._connection, sql, {"due": 0, "future": 1}[kind])[0][0]


@pytest.fixture
def connection(database, urls):
    with closing(connect(urls.database)) as connection:
        yield connection


@pytest.fixture
def ledger(connection, urls):
    thread = Ledger(urls.database)
    thread.start()
    yield thread
    thread.stop()


def test_schedulers_and_workers_survive_kills_and_an_emptied_redis(connection, ledger, services, say, outcome):
    schedulers = [services(f"scheduler{n}", "scheduler", **ENVIRONMENT) for n in range(3)]
    arguments = ("worker", "--processes", "1", "--threads", "2")
    workers = [services(f"worker{n}", *arguments, **ENVIRONMENT) for n in range(2)]
    everyone, statuses = [*schedulers, *workers], Statuses(connection)
    assert wait_until(lambda: newest_success(ledger) is not None, START), "nothing ever ran"

    faults = torment(schedulers, workers, statuses.keep_up)

    for service in everyone:
        service.restart_if_dead()
    ended = datetime.now(UTC)
    recovered = wait_until(lambda: (newest_success(ledger) or ended) > ended, RECOVERY)
    recovery = (datetime.now(UTC) - ended).total_seconds()
    drained = wait_until(lambda: statuses.count("due") == 0, RECOVERY)
    statuses_of_schedulers = [scheduler.stop() for scheduler in schedulers]
    # One without a timetable stays: a run that a busy machine has taken for lost waits to be sent again.
    sender = services("sender", "scheduler", **ENVIRONMENT | {"cron_user_status_cleanup": "off"})
    closed = wait_until(lambda: all(row["state"] not in OPEN for row in rows(connection)), RECOVERY)
    statuses_of_schedulers.append(sender.stop())
    statuses_of_workers = [worker.stop() for worker in workers]
    ledger.stop()
    ledger.sample(connection)
    attempts = attempts_of(workers, ledger)
    say(*summary(faults, ledger, attempts, recovery))
    doubled = [run for run, count in successes(workers).items() if count > 1]
    wrong = [*ledger.wrong, *missing_ticks(ledger.rows), *overlapping(attempts), *doubled]
    for fault, kinds in FAULTS.items():
        if injected := sum(faults[kind] for kind in kinds):
            outcome(fault, injected=injected, violations=len(wrong), recovery=[recovery], duplicates=len(doubled))

    assert recovered, f"no new tick succeeded within {RECOVERY} s after the faults stopped"
    assert drained, "statuses that are due were left"
    assert closed, "a run stayed open"
    assert ledger.wrong == []
    assert statuses.count("future") == statuses.made
    assert missing_ticks(ledger.rows) == []
    assert overlapping(attempts) == []
    assert doubled == []
    assert (statuses_of_schedulers, statuses_of_workers) == ([0] * 4, [0, 0])


def torment(schedulers, workers, pulse):
    """Inject a random fault every second or two, for as long as it takes; count them by kind."""
    dice, faults = random.Random(SEED), Counter()
    ending = time.monotonic() + DURATION
    next_fault, next_flush = time.monotonic() + 2, time.monotonic() + FLUSH_EVERY
    pacing = threading.Event()
    while time.monotonic() < ending:
        pacing.wait(SAMPLE_EVERY)
        pulse()
        for service in (*schedulers, *workers):
            service.restart_if_dead()
        if time.monotonic() >= next_flush:
            client.flushall()
            faults["Redis emptied"] += 1
            next_flush += FLUSH_EVERY * dice.uniform(0.8, 1.2)
        if time.monotonic() >= next_fault:
            faults[inject(dice, schedulers, workers)] += 1
            next_fault += dice.uniform(0.5, 3)
    return faults


def inject(dice, schedulers, workers):
    kind = dice.choice(["a scheduler", "a scheduler", "a worker with its master", "a worker process", "all schedulers"])
    if kind == "a scheduler":
        dice.choice(schedulers).kill()
    elif kind == "all schedulers":
        for scheduler in schedulers:
            scheduler.kill()
    elif kind == "a worker with its master":
        dice.choice(workers).kill()
    else:
        worker = dice.choice(workers)
        if not worker.kill_a_child(dice):
            return "nobody there"
        # The master ends because of it, but up to a second later, with a status of its own.
        assert wait_until(lambda: worker.process.poll() is not None, START), "a master outlived its only process"
    return f"{kind} killed"


def newest_success(ledger):
    return max((row["tick"] for row in list(ledger.rows.values()) if row["state"] == "succeeded"), default=None)


def missing_ticks(ledger):
    ticks = sorted(row["tick"] for row in ledger.values())
    second = timedelta(seconds=1)
    expected = [ticks[0] + number * second for number in range(round((ticks[-1] - ticks[0]) / second) + 1)]
    return sorted(set(expected) ^ set(ticks)) + [tick for tick, count in Counter(ticks).items() if count > 1]


@dataclass
class Attempt:
    """One attempt, as its worker's log lines tell, and the row where that is more exact."""

    run: int
    number: int
    began: datetime
    ended: datetime | None = None
    how: str = "silence"


def attempts_of(workers, ledger):
    """Pair the log's beginnings with endings; a killed worker's attempt ended with its process."""
    attempts, deaths = {}, defaultdict(list)
    for worker in workers:
        for pid, at in worker.deaths:
            deaths[pid].append(datetime.fromtimestamp(at, UTC))
        for line in worker.lines():
            key = (line.get("run"), line.get("attempt"))
            if line.get("message") == "run started":
                attempts[key] = Attempt(*key, datetime.fromisoformat(line["at"]))
                pid = int(line["worker"].rpartition(":")[2])
                attempts[key].ended = min((at for at in deaths[pid] if at > attempts[key].began), default=None)
            elif line.get("message") in ENDINGS and key in attempts:
                attempts[key].ended, attempts[key].how = datetime.fromisoformat(line["at"]), line["message"]
    for key, attempt in attempts.items():
        row = ledger.rows[attempt.run]
        if attempt.how == "run finished":
            assert (row["state"], row["attempt"]) == ("succeeded", attempt.number)
            attempt.began, attempt.ended = row["started_at"], row["finished_at"]
        elif ledger.signs.get(key) is not None:
            # Silent for so long, it ends by itself before its next chunk.
            silent = ledger.signs[key] + DEAD_AFTER
            attempt.ended = min(silent, attempt.ended or silent)
    return sorted(attempts.values(), key=lambda attempt: attempt.began)


def overlapping(attempts):
    """Return the neighbours of which the second began while the first lived."""
    return [
        (first, second)
        for first, second in pairwise(attempts)
        if first.ended is None or first.ended - (SLACK if first.how != "run finished" else timedelta(0)) > second.began
    ]


def successes(workers):
    return Counter(
        line["run"] for worker in workers for line in worker.lines() if line.get("message") == "run finished"
    )


def summary(faults, ledger, attempts, recovery):
    states = Counter(row["state"] + (f" ({row['reason']})" if row["reason"] else "") for row in ledger.rows.values())
    endings = Counter(attempt.how for attempt in attempts)
    lines = [f"seed {SEED}, {DURATION:.0f} s, {ledger.samples} samples of the ledger"]
    for title, counts in (("faults", faults), ("ticks", states), ("attempts", endings)):
        lines += [f"  {title} ({counts.total()})", *(f"    {count:5} {name}" for name, count in counts.most_common())]
    return [*lines, f"  first new success {recovery:.1f} s after the last fault"]
