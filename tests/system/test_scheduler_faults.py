"""Schedulers that are killed in the middle of a tick, and clocks that are wrong or jump."""

import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.database import now
from forgekeeper.runs.ledger import CLOCK_TOLERANCE, JobRun
from models import UserStatus
from tests.harness import samples as sample
from tests.harness.machine import Held
from tests.harness.waiting import wait_until

LIMIT = 60.0
SECOND = timedelta(seconds=1)
BATCH = "user_status_cleanup"
# No worker dies: a run that a busy machine keeps waiting must not be taken for a dead one's.
OFF = {f"cron_{batch}": "off" for batch in BATCHES} | {"dead_after": "30", "log_format": "json"}
FREQUENT = (BATCH, "stale_imports", "prune")
"""Several: so each of the schedulers is soon the first at one of them."""
EVERY_SECOND = OFF | {f"cron_{batch}": "* * * * * *" for batch in FREQUENT} | {"poll_interval": "0.5"}
WORKER = ("worker", "--processes", "1", "--threads", "2")


class Timetable:
    """Schedulers side by side, and what the ledger and their logs say of the ticks."""

    def __init__(self, services):
        self._services = services
        self.schedulers = []
        self._held_up = None

    def start(self, **environment):
        name = f"scheduler{len(self.schedulers)}"
        scheduler = self._services(name, "scheduler", **EVERY_SECOND | environment)
        self.schedulers.append(scheduler)
        return scheduler

    def claims(self, scheduler):
        """Count the ticks that the present life of the scheduler has given a row."""
        return JobRun.select().where(JobRun.claimed_by.endswith(f":{scheduler.process.pid}")).count()

    def all_started(self):
        """Wait until all have said that they keep the timetable; from then on they are expected to keep every tick."""

        def said():
            return all(any(line["message"] == "scheduler started" for line in one.lines()) for one in self.schedulers)

        every = wait_until(said, LIMIT)
        self._held_up = Held(lambda: [scheduler.process.pid for scheduler in self.schedulers])
        return every

    def at_work(self, scheduler):
        """Stop the others, and wait until the scheduler has given another tick its row."""
        others = [other.process for other in self.schedulers if other is not scheduler]
        for other in others:
            other.send_signal(signal.SIGSTOP)
        before = self.claims(scheduler)
        claims = wait_until(lambda: self.claims(scheduler) > before, LIMIT)
        for other in others:
            other.send_signal(signal.SIGCONT)
        return claims

    def missed(self):
        """Count the ticks between the first and the last that have no row, or more than one, or were not made up for.

        One that is a second late has been overtaken by the next, which did its work: that happens where a scheduler
        is stopped with the tick's row in hand, to a fifth at most, or all of them have to wait for a busy machine.
        """
        ticks_of_all = JobRun.select().count()
        overtaken = JobRun.select().where(JobRun.state == "coalesced").count()
        # Where all are held up for a second, a tick of each batch is.
        most = min(ticks_of_all / 5 + len(FREQUENT) * self.held_up(), ticks_of_all / 2)
        late = JobRun.select().where(JobRun.state == "missed").count() + (overtaken > most)
        return late + sum(later - earlier != SECOND for batch in FREQUENT for earlier, later in pairwise(ticks(batch)))

    def held_up(self):
        """Say for how long the machine may have held up all of them at once, since they had started."""
        return self._held_up.seconds() / len(self.schedulers)

    def sent_again(self):
        """Count messages that were sent although they had been sent; a worker finds their runs closed."""
        sent = Counter(
            line["run"]
            for scheduler in self.schedulers
            for line in scheduler.lines()
            if line.get("message") == "run sent"
        )
        return sum(count - 1 for count in sent.values())

    def doubled(self):
        """Count the runs of which there was more than one attempt."""
        return JobRun.select().where(JobRun.attempt > 1).count()

    def lateness(self):
        """Return how late the latest row was made, in seconds."""
        return max((row.claimed_at - row.tick).total_seconds() for row in JobRun.select())

    def earliness(self):
        return max(row.tick - row.claimed_at for row in JobRun.select())


def ticks(batch):
    return [tick for (tick,) in JobRun.select(JobRun.tick).where(JobRun.batch == batch).order_by(JobRun.tick).tuples()]


@pytest.fixture
def timetable(database, services):
    return Timetable(services)


def pass_time(seconds):
    """Let a fault last: its length is what is tested."""
    threading.Event().wait(seconds)


@pytest.mark.parametrize(("step", "by"), [("tick.claimed", "another"), ("tick.sent", "its successor")])
def test_a_tick_whose_scheduler_was_killed_is_sent_once(timetable, services, outcome, step, by):
    # One that has no timetable still sends what others have claimed.  The interval is the default.
    watching = OFF | {"poll_interval": "5"}
    others = [services("another", "scheduler", **watching)] if by == "another" else []
    one = {f"cron_{batch}": "off" for batch in FREQUENT if batch != BATCH}
    killed = timetable.start(failpoints=f"{step}=kill", **one)
    assert wait_until(lambda: killed.process.poll() is not None, LIMIT), "the scheduler was not killed"
    run, died_at = JobRun.open(BATCH), time.monotonic()
    if not others:
        others = [services("successor", "scheduler", **watching)]
    timetable.schedulers += others

    sent = wait_until(lambda: JobRun.get_by_id(run.id).state == "enqueued", LIMIT)
    recovery = time.monotonic() - died_at
    services("worker", *WORKER, **OFF)
    done = wait_until(lambda: JobRun.get_by_id(run.id).state == "succeeded", LIMIT)

    again = timetable.sent_again()
    violations = (not sent) + (not done)
    outcome(10, injected=1, violations=violations, recovery=[recovery], duplicates=again)
    assert {line["name"] for line in killed.lines() if line.get("message") == "failpoint reached"} == {step}
    assert (sent, done, again) == (True, True, 0)
    assert timetable.doubled() == 0


CLOCK = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long right, *ahead = &right;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CLOCK_FILE");
    int file = name ? open(name, O_RDONLY) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof right, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) ahead = page;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, id, at);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead;
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""A wall clock that is a number of seconds ahead, which may change at any moment; the monotonic one stays right."""


class Clock:
    """The wall clock of the processes that are started `worn`."""

    def __init__(self, library, file, monkeypatch):
        self._library, self._file, self._monkeypatch = library, file, monkeypatch
        self.ahead(0)

    def ahead(self, seconds):
        """Set the clock to be so far ahead, for those that wear it already, too."""
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(struct.pack("l", round(seconds)))

    @contextmanager
    def worn(self):
        """Let what is started meanwhile have this clock."""
        with self._monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self._library))
            patch.setenv("CLOCK_FILE", str(self._file))
            yield


@pytest.fixture
def clocks(tmp_path, monkeypatch):
    """Make clocks, all right at first."""
    compiler = shutil.which("cc")
    if compiler is None:
        assert "CI" not in os.environ, "there is no C compiler: it is needed to make a clock that is wrong"
        pytest.skip("there is no C compiler to make a clock that is wrong")
    library = tmp_path / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=CLOCK.encode(), check=True)
    return lambda name: Clock(library, tmp_path / name, monkeypatch)


def test_clocks_that_are_wrong_or_jump_neither_lose_nor_repeat_a_tick_nor_delete_early(
    timetable, services, clocks, outcome
):
    hour, minutes = 3600, -300
    sample.user_statuses(100)
    UserStatus.update(clear_status_at=now() + timedelta(minutes=30)).execute()
    fast, slow, worn_by_worker = map(clocks, ("fast", "slow", "worker"))
    fast.ahead(hour)
    slow.ahead(minutes)
    worn_by_worker.ahead(hour)
    timetable.start()
    for clock in (fast, slow):
        with clock.worn():
            timetable.start()
    with worn_by_worker.worn():
        services("worker", *WORKER, **EVERY_SECOND)
    assert timetable.all_started()
    assert wait_until(lambda: JobRun.last_ended(BATCH) is not None, LIMIT)
    pass_time(2)

    jumps = [(fast, minutes), (slow, hour), (fast, 1), (slow, -1), (fast, 0), (slow, 0)]
    for clock, seconds in jumps:
        clock.ahead(seconds)
        pass_time(1)

    missed, again, late = timetable.missed(), timetable.sent_again(), timetable.lateness()
    early = timetable.earliness()
    left = UserStatus.select().count()
    wrong = missed + (early > CLOCK_TOLERANCE) + (100 - left)
    outcome(11, injected=3 + len(jumps), violations=wrong, recovery=[late], duplicates=again)
    assert (missed, timetable.doubled()) == (0, 0)
    assert early <= CLOCK_TOLERANCE
    assert left == 100
    # APScheduler still waits for an hour that has been taken back; the loops do not.
    assert all(timetable.at_work(scheduler) for scheduler in timetable.schedulers), "one has stopped"
