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
from tests.harness.waiting import wait_until

LIMIT = 60.0
BATCH = "user_status_cleanup"
# No worker dies: a run that a busy machine keeps waiting must not be taken for a dead one's.
OFF = {f"cron_{batch}": "off" for batch in BATCHES} | {"dead_after": "30", "log_format": "json"}
FREQUENT = (BATCH, "stale_imports", "prune")
"""Several: so each of the schedulers is soon the first at one of them."""
EVERY_SECOND = OFF | {f"cron_{batch}": "* * * * * *" for batch in FREQUENT} | {"poll_interval": "0.5"}
WORKER = ("worker", "--processes", "1", "--threads", "2")


def sent_again(schedulers):
    """Count messages that were sent although they had been sent; a worker finds their runs closed."""
    sent = Counter(line["run"] for scheduler in schedulers for line in scheduler.said("run sent"))
    return sum(count - 1 for count in sent.values())


def doubled():
    """Count the runs of which there was more than one attempt."""
    return JobRun.select().where(JobRun.attempt > 1).count()


@pytest.mark.parametrize(("step", "by"), [("tick.claimed", "another"), ("tick.sent", "its successor")])
def test_a_tick_whose_scheduler_was_killed_is_sent_once(database, services, outcome, step, by):
    # One that has no timetable still sends what others have claimed.  The interval is the default.
    watching = OFF | {"poll_interval": "5"}
    schedulers = [services("another", "scheduler", **watching)] if by == "another" else []
    one = {f"cron_{batch}": "off" for batch in FREQUENT if batch != BATCH}
    killed = services("killed", "scheduler", **EVERY_SECOND | one, failpoints=f"{step}=kill")
    assert wait_until(lambda: killed.process.poll() is not None, LIMIT), "the scheduler was not killed"
    run, died_at = JobRun.open(BATCH), time.monotonic()
    schedulers = [killed, *(schedulers or [services("successor", "scheduler", **watching)])]

    sent = wait_until(lambda: JobRun.get_by_id(run.id).state == "enqueued", LIMIT)
    recovery = time.monotonic() - died_at
    services("worker", *WORKER, **OFF)
    done = wait_until(lambda: JobRun.get_by_id(run.id).state == "succeeded", LIMIT)

    again = sent_again(schedulers)
    outcome(10, injected=1, violations=(not sent) + (not done), recovery=[recovery], duplicates=again)
    assert {line["name"] for line in killed.said("failpoint reached")} == {step}
    assert (sent, done, again, doubled()) == (True, True, 0, 0)


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
            # A fork would not load the library.
            patch.setenv("NO_FORKS", "1")
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


def gaps():
    """Count the ticks that have no row or more than one, or whose time has gone by."""
    missed = JobRun.select().where(JobRun.state == "missed").count()
    for batch in FREQUENT:
        rows = JobRun.select(JobRun.tick).where(JobRun.batch == batch).order_by(JobRun.tick).tuples()
        missed += sum(later - earlier != timedelta(seconds=1) for (earlier,), (later,) in pairwise(rows))
    return missed


def claims(scheduler):
    """Count the ticks that it has given a row."""
    return JobRun.select().where(JobRun.claimed_by.endswith(f":{scheduler.process.pid}")).count()


def claims_by_itself(scheduler, schedulers):
    """Stop the others, and wait until the scheduler has given another tick its row."""
    others = [other.process for other in schedulers if other is not scheduler]
    for other in others:
        other.send_signal(signal.SIGSTOP)
    before = claims(scheduler)
    more = wait_until(lambda: claims(scheduler) > before, LIMIT)
    for other in others:
        other.send_signal(signal.SIGCONT)
    return more


def pass_time(seconds):
    """Let a fault last: its length is what is tested."""
    threading.Event().wait(seconds)


def test_clocks_that_are_wrong_or_jump_neither_lose_nor_repeat_a_tick_nor_delete_early(
    database, services, clocks, outcome
):
    hour, minutes = 3600, -300
    sample.user_statuses(100)
    UserStatus.update(clear_status_at=now() + timedelta(minutes=30)).execute()
    fast, slow, worn_by_worker = map(clocks, ("fast", "slow", "worker"))
    fast.ahead(hour)
    slow.ahead(minutes)
    worn_by_worker.ahead(hour)
    schedulers = [services("right", "scheduler", **EVERY_SECOND)]
    for name, clock in (("fast", fast), ("slow", slow)):
        with clock.worn():
            schedulers.append(services(name, "scheduler", **EVERY_SECOND))
    with worn_by_worker.worn():
        services("worker", *WORKER, **EVERY_SECOND)
    assert wait_until(lambda: all(one.said("scheduler started") for one in schedulers), LIMIT)
    assert wait_until(lambda: JobRun.last_ended(BATCH) is not None, LIMIT)

    jumps = [(fast, minutes), (slow, hour), (fast, 1), (slow, -1), (fast, 0), (slow, 0)]
    for clock, seconds in jumps:
        clock.ahead(seconds)
        pass_time(1)

    missed, again, left = gaps(), sent_again(schedulers), UserStatus.select().count()
    late = max((row.claimed_at - row.tick).total_seconds() for row in JobRun.select())
    early = max(row.tick - row.claimed_at for row in JobRun.select())
    wrong = missed + (early > CLOCK_TOLERANCE) + (100 - left)
    outcome(11, injected=3 + len(jumps), violations=wrong, recovery=[late], duplicates=again)
    assert (missed, doubled(), left) == (0, 0, 100)
    assert early <= CLOCK_TOLERANCE
    # APScheduler still waits for an hour that has been taken back; the loops do not.
    assert all(claims_by_itself(scheduler, schedulers) for scheduler in schedulers), "one has stopped"
