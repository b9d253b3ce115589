"""A state machine that tries to break the ledger.

It uses real PostgreSQL and Redis, but the machine sets the clock of the database, and schedulers may stall before any
query to a server, continue much later, or never.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger import reconcile
from forgekeeper.ledger.batches_to_reconcile import find_batches_to_reconcile
from forgekeeper.ledger.holds import KINDS_BY_PEOPLE, Batch, Hold
from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE, OPEN_STATES, JobRun
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from tests.harness.ledger_workers import NAME, Worker, Workers, picks
from tests.harness.settings import settings_with
from tests.harness.stalling import StallingProcess

SCHEDULES = ("* * * * * *", "* * * * *", "*/10 * * * *")
FINAL = {"succeeded", "failed", "skipped", "coalesced", "missed", "blocked"}
DAWN = datetime(2026, 3, 1, 11, 58, 30, tzinfo=UTC)
SECONDS = (0.3, 1, 2.5, 6, 14, 16, 31, 61, 700, 15_000)
ROUNDS = 12
QUEUE = f"forgekeeper:{BATCHES[NAME].queue}"

# A copy must not have the name of its table: the machine's connections search this schema first.
BACK_UP = """
    create unlogged table if not exists fake.runs as table job_runs with no data;
    create unlogged table if not exists fake.paused as table batches with no data;
    create unlogged table if not exists fake.held as table holds with no data;
    create unlogged table if not exists fake.numbers as select last_value, is_called from job_runs_id_seq with no data;
    delete from fake.runs; delete from fake.paused; delete from fake.held; delete from fake.numbers;
    insert into fake.runs table job_runs;
    insert into fake.paused table batches;
    insert into fake.held table holds;
    insert into fake.numbers select last_value, is_called from job_runs_id_seq;
"""
# An insert into `batches` also inserts holds, so these are deleted again.
RESTORE = """
    delete from job_runs; delete from batches; delete from holds;
    insert into job_runs select * from fake.runs;
    insert into batches select * from fake.paused;
    delete from holds;
    insert into holds select * from fake.held;
    select setval('job_runs_id_seq', last_value, is_called) from fake.numbers;
"""
ROWS = "select id, tick, state, reason, attempt, failures, finished_at, xmin::text from job_runs order by id"


@dataclass
class World:
    """The expected state, to compare the ledger with."""

    rows: dict = field(default_factory=dict)
    owners: dict = field(default_factory=dict)  # the token of each run's newest attempt
    successes: Counter = field(default_factory=Counter)


drifts = st.sampled_from([None, *(timedelta(seconds=seconds) for seconds in (-3_600, -5, 0, 0.7, 1.9, 3, 3_600))])


class Machine(Workers):
    @initialize(schedule=st.sampled_from(SCHEDULES), catch_up=st.sampled_from(["once", "skip"]))
    def begin(self, schedule, catch_up):
        db.database.execute_sql("delete from job_runs; delete from batches; delete from holds")
        client.flushdb()
        self.configured = settings_with(cron_user_status_cleanup=schedule, catch_up_user_status_cleanup=catch_up)
        self.world = World()
        self.stalled = []
        self.tokens = set()
        self.backup = None
        self.paused_until = None
        self.terminal = Worker("terminal")
        self.workers = [self.hire_worker() for _ in range(3)]
        self.set_clock(DAWN)
        Batch.insert(name=NAME, registered_at=DAWN).execute()

    def set_clock(self, instant):
        self.now = instant
        db.database.execute_sql("update fake.clock set at = %s", (instant,))

    # The clock

    @rule(seconds=st.sampled_from(SECONDS))
    def time_passes(self, seconds):
        self.set_clock(self.now + timedelta(seconds=seconds))

    @rule(drift=drifts, take=st.booleans())
    def a_tick_comes(self, drift, take):
        early = min(max(drift or timedelta(0), timedelta(0)), CLOCK_TOLERANCE)
        self.set_clock(max(self.now, self.configured.schedule_of(NAME).next_after(self.now + early) - early))
        self.a_scheduler_fires(drift)
        if take and self.idle:
            self.take(self.idle[0], rescue=False)

    # Schedulers: they fire at any time, with clocks of their own

    @rule(drift=drifts)
    def a_scheduler_fires(self, drift):
        self.reconcile(drift)
        # Check now: a worker that takes the run would hide the scheduler's change.
        self.the_ledger_is_sound()
        self.check_reconciled()

    @rule()
    def a_scheduler_looks(self):
        named = NAME in find_batches_to_reconcile([NAME], self.configured)
        before, waiting = self.read(), client.llen(QUEUE)
        self.reconcile(None)
        assert named or (self.read(), client.llen(QUEUE)) == (before, waiting), "a batch was overlooked"

    def reconcile(self, drift):
        due_hint = None if drift is None else self.configured.schedule_of(NAME).latest_until(self.now + drift)
        reconcile.reconcile_batch(NAME, self.configured, enqueue_run, by=f"fires at {self.now}", due_hint=due_hint)

    def check_reconciled(self):
        due = self.configured.schedule_of(NAME).latest_until(self.now)
        assert due <= DAWN or JobRun.select().where(JobRun.tick == due).exists(), "a tick was overlooked"
        run = JobRun.find_open(NAME)
        if run is None:
            return
        if run.state == "started":
            assert self.now - run.alive_at <= self.configured.dead_after, "a lost run was overlooked"
            return
        if not self.paused and (run.retry_at is None or run.retry_at <= self.now):
            assert run.state == "enqueued"
            since = run.enqueued_at and self.now - run.enqueued_at
            assert since is not None, "a run was not sent"
            assert since < reconcile.RESEND_AFTER, "a run was not sent again"

    @precondition(lambda self: len(self.stalled) < 3)
    @rule(drift=drifts, queries=st.integers(0, 11))
    def a_scheduler_fires_and_stalls(self, drift, queries):
        self.launch(lambda: self.reconcile(drift), queries)

    def launch(self, work, queries):
        process = StallingProcess(work, queries)
        if process.error is not None:
            raise process.error
        if not process.ended:
            self.stalled.append(process)

    @precondition(lambda self: self.stalled)
    @rule(pick=picks, queries=st.integers(0, 3) | st.just(-1))
    def a_stalled_process_continues(self, pick, queries):
        pick(self.stalled).resume(queries)
        self.stalled = [process for process in self.stalled if not process.ended]

    @precondition(lambda self: self.stalled)
    @rule(pick=picks)
    def a_stalled_process_is_killed(self, pick):
        process = pick(self.stalled)
        process.die()
        self.stalled.remove(process)

    # Redis and people

    @rule()
    def redis_is_emptied(self):
        client.flushall()

    @rule()
    def a_backup_is_made(self):
        db.database.execute_sql(BACK_UP)
        self.backup = self.world.owners.copy(), self.paused_until

    @precondition(lambda self: self.backup)
    @rule()
    def the_database_comes_back_older(self):
        db.database.execute_sql(RESTORE)
        owners, self.paused_until = self.backup
        # Runs of the backup have their heartbeats of that time; later attempts are lost and do not count as alive.
        self.world = World(rows=self.read(), owners=owners.copy())
        signs = {str(run.attempt_token): run.alive_at for run in JobRun.select().where(JobRun.state == "started")}
        for worker in self.running:
            worker.alive_at = signs.get(worker.run.token, DAWN - timedelta(days=1))

    @property
    def paused(self):
        return self.paused_until is not None and self.now < self.paused_until

    @precondition(lambda self: not self.paused)
    @rule(minutes=st.sampled_from([1, 30, 10_000_000]))
    def somebody_pauses(self, minutes):
        self.paused_until = self.now + timedelta(minutes=minutes)
        Hold.add(NAME, "pause", until=self.paused_until, reason=None, by="me")

    @precondition(lambda self: self.paused)
    @rule()
    def somebody_resumes(self):
        self.paused_until = None
        assert Hold.lift(NAME, KINDS_BY_PEOPLE), "the pause was forgotten"

    @precondition(lambda self: len(self.stalled) < 3)
    @rule(queries=st.integers(0, 4) | st.just(-1))
    def somebody_sends(self, queries):
        self.launch(lambda: JobRun.claim_manual(NAME, by="me") and reconcile.send_open_run(NAME, enqueue_run), queries)

    @precondition(lambda self: self.terminal.run is None and not self.paused)
    @rule()
    def somebody_runs(self):
        run = JobRun.start_here(NAME, by="me")
        if run is not None:
            self.begin_attempt(self.terminal, run)

    # Invariants after every step

    @invariant()
    def the_ledger_is_sound(self):
        before, self.world.rows = self.world.rows, self.read()
        after = self.world.rows
        assert before.keys() <= after.keys()
        assert sum(row["state"] in OPEN_STATES for row in after.values()) <= 1, "two open runs"
        ticks = [row["tick"] for row in after.values() if row["tick"] is not None]
        assert len(ticks) == len(set(ticks)), "a tick has two rows"
        for run, row in after.items():
            if run not in before:
                self.check_new(row)
            elif row != before[run]:
                self.check_changed(before[run], row)

    def read(self):
        cursor = db.database.execute_sql(ROWS)
        names = [column.name for column in cursor.description]
        return {row[0]: dict(zip(names, row, strict=True)) for row in cursor}

    def check_new(self, row):
        assert row["state"] in OPEN_STATES or row["state"] in FINAL
        if row["tick"] is not None:
            assert row["tick"] <= self.now + CLOCK_TOLERANCE, "a tick was recorded before its time"
            if row["state"] in OPEN_STATES:
                assert not self.paused, "a tick was claimed during a pause"

    def check_changed(self, before, row):
        assert before["state"] in OPEN_STATES, "a closed row was changed"
        assert row["state"] in OPEN_STATES or row["state"] in FINAL
        assert row["attempt"] >= before["attempt"]
        if row["reason"] == "superseded":
            assert any(self.is_newer(other, row) for other in self.world.rows.values()), "a retry gave way to nothing"

    @staticmethod
    def is_newer(other, row):
        ran = other["state"] not in ("skipped", "coalesced", "missed")
        return ran and other["tick"] is not None and (row["tick"] is None or other["tick"] > row["tick"])

    @invariant()
    def at_most_one_attempt_lives(self):
        # An attempt that has been silent for longer ends by itself at its next safe point.
        living = [worker for worker in self.running if self.now - worker.alive_at <= self.configured.dead_after]
        assert len(living) <= 1, "two attempts live"

    @invariant()
    def a_run_succeeds_at_most_once(self):
        assert all(count == 1 for count in self.world.successes.values())

    # Recovery once the faults stop

    def teardown(self):
        failing = sys.exc_info()[0] is not None
        for process in getattr(self, "stalled", []):
            if not process.ended:
                process.die()
        if not failing and hasattr(self, "world"):
            self.recover()

    def recover(self):
        if self.paused:
            self.somebody_resumes()
        for worker in [*self.workers, self.terminal]:
            self.kill(worker)
        self.set_clock(self.now + self.configured.dead_after)
        healthy, since = self.workers[0], self.now
        for _ in range(ROUNDS):
            self.set_clock(self.configured.schedule_of(NAME).next_after(self.now + timedelta(seconds=5)))
            self.a_scheduler_fires(None)
            self.fetch(healthy, rescue=True)
            while healthy.message is not None:
                self.start(healthy)
                if healthy.run is not None:
                    self.succeed(healthy)
                    self.acknowledge(healthy)
                self.fetch(healthy, rescue=True)
            self.the_ledger_is_sound()
            if any(
                row["state"] == "succeeded" and row["tick"] and row["tick"] > since for row in self.world.rows.values()
            ):
                return
        raise AssertionError("the batch is stuck")
