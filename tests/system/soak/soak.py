"""A soak: everything at once, for as long as you like, and then the question whether the history is possible.

    python -m tests.system.soak --minutes 30 --seed 7

Schedulers, workers and simulated users work on servers of their own while faults are injected
in rounds: some at a time, then a pause until every batch has succeeded again.  Now and then,
and after the last of them, what is due must be done within a minute.  In the end the history
is checked.  A seed repeats the faults, when they begin and for how long they last; what they
hit depends on timing.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg2

from demo.tables import make_tables
from forgekeeper.api.batches import BATCHES
from forgekeeper.platform import migrations
from forgekeeper.platform.database import database
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import open_pool
from tests.harness import forks
from tests.harness.installation import INSTALLATION
from tests.harness.machine import MachineDelay
from tests.harness.programs import ROOT
from tests.harness.stale_uploads import uploads as register
from tests.harness.waiting import wait_until
from tests.system.matrix import Outcome
from workers import expired_job_artifacts, git_ref_cleanup

from . import rights, standing, watch
from .citizens import Place
from .evidence import Evidence
from .faults import rounds
from .history import History
from .producers import CITIZENS
from .properties import BOUND, PROPERTIES, check
from .rig import Rig, nothing_armed
from .settings import PAUSE, PERIODS, SECRET, STATEMENT_TIMEOUT

EVERYTHING = 43
MINUTE = timedelta(minutes=1)
START = 120.0
DONE_IN = 60.0
"""So long after the last fault what was due then must be done, if the machine holds nobody up."""
CALM = 8
"""After each so many rounds that is asked as well, and not only in the end."""
RECOVERY = 60.0
"""So long after the last fault every batch must have succeeded again."""
NEARLY_DUE = 8.0
"""Whatever citizens make is due within so many seconds, or not for an hour."""
DRAIN = 90.0
RECONCILED = 45.0
CHUNK = 10.0
TWO_DAYS = 2 * 24 * 3600
BUDGETS = {name: batch.budget.total_seconds() for name, batch in BATCHES.items()} | {
    "delete_artifact_bucket": expired_job_artifacts.MAX_RUNTIME.total_seconds(),
    "clean_project_refs": git_ref_cleanup.LOCK_TIMEOUT.total_seconds(),
}
NEWEST = "select batch, extract(epoch from max(started_at))::float8 from job_runs where state = 'succeeded' group by 1"


@dataclass
class Report:
    """What a soak has come to."""

    seed: int
    seconds: float
    faults: Counter = field(default_factory=Counter)
    violations: dict = field(default_factory=dict)
    recoveries: list = field(default_factory=list)
    duplicates: int = 0
    notes: list = field(default_factory=list)
    done_in: dict = field(default_factory=dict)
    """Batch -> seconds that it took to do what was due, each time it was asked."""

    @property
    def outcome(self):
        """Return the row of the table."""
        count = sum(map(len, self.violations.values()))
        return Outcome(self.faults.total(), count, self.recoveries, self.duplicates)

    def lines(self):
        """Yield the report for people to read."""
        yield f"seed {self.seed}, {self.seconds:.0f} s of faults"
        yield f"  faults ({self.faults.total()})"
        yield from (f"    {count:6} {name}" for name, count in sorted(self.faults.items()))
        yield from (f"  {note}" for note in self.notes)
        for batch, seconds in self.done_in.items():
            yield f"  due work of {batch} was done in: {'/'.join(Outcome(recovery=seconds).points())} s (p50/p95/max)"
        for name, sentences in self.violations.items():
            yield f"  {name} {len(sentences):4}  {PROPERTIES[name].__doc__.splitlines()[0].partition(': ')[2]}"
            yield from (f"        {sentence}" for sentence in sentences[:20])
        yield f"  every batch succeeded again after: {'/'.join(self.outcome.points())} s (p50/p95/max)"


class Soak:
    """One soak in a folder: servers, services, citizens, faults; then the drain and the check."""

    def __init__(self, stack, path, *, seed, seconds, say):
        self.dice = random.Random(seed)
        self.report = Report(seed, seconds)
        self.path = path
        self._say = say
        self.history = History(path / "history.jsonl")
        stack.callback(self.history.close)
        # Its own dice: how often it is asked depends on timing, and the faults shall not.
        self.rig = Rig(stack, path, self.history, seed)
        self.place = Place(self.rig)
        stack.callback(self.place.close)
        self._migrate()
        rights.make_roles(self.rig.ask)
        self.citizens = [citizen(self.place, self.history, seed) for citizen in CITIZENS]
        self.watcher = watch.Watcher(self.place, self.history, seed)
        stack.callback(self._still)

    def _migrate(self):
        open_pool(self.rig.servers.database_url, Timeouts(*[MINUTE] * 5), name="soak", size=1)
        with database.connection_context():
            migrations.apply_pending(database.obj)
            make_tables(database.obj)
        self.rig.ask("insert into feature_flags (name, enabled) values ('bulk_delete_job_artifacts', true)")
        self.rig.ask(f"update installation set id = '{INSTALLATION}'")

    def _still(self):
        for thread in (*self.citizens, self.watcher):
            if thread.is_alive():
                thread.stop()

    def run(self):
        """Do it all; return the report."""
        for citizen in self.citizens:
            citizen.start()
        with nothing_armed(self.rig):
            for service in self.rig.services:
                self.rig.begin(service)
            assert self._succeeded_after(0.0, START) is not None, "nothing ever ran"
        self.watcher.start()
        self._torment()
        self._drain()
        self._rest()
        final = standing.final(self.rig, self.citizens[-1].bares)
        final.changed_at_rest = self.changed
        final.effects = {record: abs(count - self.due[record]) for record, count in standing.tally(self.rig).items()}
        final.counted = watch.counted(self.rig.workers)
        self._reconcile(final)
        self._end()
        final.stranded, final.buckets = standing.stranded(self.rig.client), standing.shares(self.rig.client)
        final.runs = standing.runs(self.rig)
        return self._judge(final)

    def _torment(self):
        ends = time.monotonic() + self.report.seconds
        for number, faults in enumerate(rounds(self.dice), 1):
            if time.monotonic() > ends:
                return
            self._say(f"{', '.join(faults)}")
            self.rig.torment(faults)
            with nothing_armed(self.rig):
                seconds = self._succeeded_after(time.time(), RECOVERY)
            self.report.recoveries.append(math.inf if seconds is None else seconds)
            self._say(f"    every batch has succeeded again after {self.report.recoveries[-1]:.1f} s")
            if number % CALM == 0:
                with nothing_armed(self.rig):
                    self._finish_what_is_due()
                self.rig.servers.shorten_redis_log()
            self.rig.let_pass(self.dice.uniform(0, 2))

    def _finish_what_is_due(self):
        """Wait until what is due now has been done, of each batch; note what it took, and what was left in the end."""
        began, held = time.monotonic(), MachineDelay(self._processes, self.rig.servers.processes)
        due = standing.due(self.rig)
        left = {batch: work for batch, work in due.items() if work}
        took = dict.fromkeys(due, 0.0)
        while left and not held.over(DONE_IN, time.monotonic() - began):
            self.rig.let_pass(0.2)
            now = standing.due(self.rig)
            left = {batch: work & now[batch] for batch, work in left.items() if work & now[batch]}
            took |= dict.fromkeys(left, time.monotonic() - began)
        for batch, seconds in took.items():
            self.report.done_in.setdefault(batch, []).append(math.inf if batch in left else seconds)
        for batch, work in left.items():
            some, seconds = sorted(work)[:5], time.monotonic() - began
            facts = {"due": len(due[batch]), "count": len(work), "left": some}
            self.history.sample("late", batch=batch, seconds=seconds, **facts)
        self.history.look("late")
        what = f"what was due ({sum(map(len, due.values()))})"
        self._say(f"    {what} was{' not' if left else ''} done in {max(took.values()):.1f} s")

    def _processes(self):
        return [pid for service in self.rig.services for pid in service.group()]

    def _succeeded_after(self, instant, limit):
        """Wait until each batch has succeeded in a run begun after *instant*; return the seconds, None for never."""
        began = time.monotonic()

        def again():
            self.rig.let_pass(0.2)
            try:
                newest = dict(self.rig.ask(NEWEST))
            except psycopg2.OperationalError:
                return False
            return all(newest.get(batch, 0.0) > instant for batch in BATCHES)

        return time.monotonic() - began if wait_until(again, limit) else None

    def _drain(self):
        """Stop the users, let what is due be done, end all services and start them anew, and wait until nothing is left.

        Those that were started in trouble are asked first: others would take up what they may keep from everybody.
        """
        for citizen in self.citizens:
            citizen.stop()
            assert citizen.broken is None, citizen.broken
        self.rig.armed = False
        self._finish_what_is_due()
        stopped = time.monotonic()
        self.report.notes.append(f"services asked to end with: {self._stop_services()}")
        self._let_time_come()
        self.due = standing.tally(self.rig)
        self.rig.be_patient()
        for service in self.rig.services:
            self.rig.begin(service)
        began = time.monotonic()
        self.rig.let_pass(stopped + NEARLY_DUE - time.monotonic())
        if not wait_until(lambda: self.rig.let_pass(0.2) or not standing.left(self.rig), DRAIN):
            self.report.notes.append(f"after {DRAIN:.0f} s there is left: {standing.left(self.rig)}")
        self.report.notes.append(f"nothing was left {time.monotonic() - began:.1f} s after the services' start")
        self.rig.let_pass(stopped + NEARLY_DUE + BOUND - time.monotonic())

    def _stop_services(self):
        """Ask all to end, and see to it that they do; return their statuses."""
        for service in self.rig.services:
            service.ask_to_end([service.pid], self.rig.servers.processes)
        statuses = []
        for service in self.rig.services:
            while left := service.group():
                if seconds := service.outlives():
                    self.rig.note_outlived(service, left, seconds)
                time.sleep(PAUSE)
            self.history.look("outlived")
            statuses.append(service.process.wait())
            service.asked = None
        return statuses

    def _let_time_come(self):
        """Let everything that waits for its next try be due: what lies in quarantine waits for minutes."""
        client = self.rig.client
        for member in client.zrange(register.keys.deleting, 0, -1):
            client.zadd(register.keys.deleting, {member: 0})
        self.rig.ask("update deleted_objects set pick_up_at = now() where attempts < 10")
        self.rig.ask("update quarantine set retry_at = now() where retry_at < 'infinity'")

    def _rest(self):
        """Let every batch run twice more where nothing is left to do."""
        before = standing.at_rest(self.rig, self.citizens[-1].bares)
        for _ in range(2):
            if self._succeeded_after(time.time(), RECOVERY) is None:
                self.report.recoveries.append(math.inf)
        wait_until(lambda: self.rig.let_pass(0.05) or not standing.busy(self.rig.client), RECOVERY)
        after = standing.at_rest(self.rig, self.citizens[-1].bares)
        self.changed = [f"{name}: {before[name]} {after[name]}"[:500] for name in before if before[name] != after[name]]

    def _reconcile(self, final):
        """Let the operator look for orphans two days later, say that they may go, and the batch delete them a day on."""
        then = time.time() - TWO_DAYS
        for path in sorted(self.rig.world.files()):
            os.utime(self.rig.world.root / path, (then, then))
        orphans = len(self._look_for_orphans()["orphans"])
        self.report.notes.append(f"reconcile found {orphans} orphans")
        self._look_for_orphans("--yes", "--expect", str(orphans))
        client = self.rig.client
        for member, due in client.zrange(register.keys.pending, 0, -1, withscores=True):
            client.zadd(register.keys.pending, {member: due - TWO_DAYS})
        wait_until(lambda: self.rig.let_pass(0.3) or not standing.left(self.rig), RECONCILED)
        final.files_then, final.named_then = sorted(self.rig.world.files()), standing.named(self.rig)
        self.report.notes.append(f"{client.zcard(register.keys.failed)} uploads given up, as planted")

    def _look_for_orphans(self, *options):
        command = ("-m", "forgekeeper.cli", "uploads", "reconcile", "artifacts", "--prefix", "", "--json", *options)
        found = forks.run(command, env={**os.environ, "PYTHONPATH": str(ROOT), **self.rig.person()}, cwd=self.path)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    def _end(self):
        short = watch.threads_short(self.rig.workers)
        if short:
            self.history.sample("threads", service=str(short), threads=0)
        self.watcher.stop()
        assert self.watcher.broken is None, self.watcher.broken
        self.report.notes.append(f"services asked to end at rest with: {self._stop_services()}")
        for sentence in rights.refused(self.rig.client):
            self.history.sample("refused", sentence=sentence)

    def _judge(self, final):
        evidence = Evidence(
            self.history.operations,
            self.history.samples,
            self.history.looked,
            final,
            logs=sorted(self.path.glob("*/*.log")),
            secrets=(SECRET,),
            periods=PERIODS,
            longest={name: seconds + CHUNK + STATEMENT_TIMEOUT for name, seconds in BUDGETS.items()},
            recoveries=self.report.recoveries,
            slowest_recovery=RECOVERY,
        )
        report = self.report
        report.violations = check(evidence)
        report.faults = self.rig.faults
        report.duplicates = sum(max(0, run["attempt"] - 1) for run in final.runs)
        operations = (one for done in self.history.operations.values() for one in done)
        did = Counter(f"{one.subject.partition(':')[0]} {one.do} {one.outcome}" for one in operations)
        report.notes.append(f"operations: {dict(sorted(did.items()))}")
        states = Counter(f"{run['state']} {run['reason'] or ''}".strip() for run in final.runs)
        report.notes.append(f"runs: {dict(sorted(states.items()))}; services started {self.rig.restarts} times")
        report.notes.append(f"looked: {dict(self.history.looked)}; Redis emptied {len(evidence.emptied)} times")
        (self.path / "final.json").write_text(json.dumps(vars(final)))
        return report


def soak(*, seed, seconds, folder, say=lambda _: None):
    """Run a soak in *folder*; return its report."""
    with ExitStack() as stack:
        return Soak(stack, folder, seed=seed, seconds=seconds, say=say).run()
