"""Workers of the state machine for the ledger: they fetch, start, send heartbeats, end, and are killed.

They fetch by Dramatiq's own scripts, at the machine's time.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from dramatiq import Message
from dramatiq.brokers.redis import DEFAULT_DEAD_MESSAGE_TTL
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.messages import TOKEN_OPTION
from forgekeeper.ledger.job_runs import JobRun, StartedRun

NAME = "user_status_cleanup"
BATCH = BATCHES[NAME]
picks = st.integers(0, 5).map(lambda number: lambda candidates: candidates[number % len(candidates)])


@dataclass
class Worker:
    """A thread of a worker process, or the terminal in which `forgekeeper run` runs."""

    name: str
    message: Message | None = None
    run: StartedRun | None = None
    ended: bool = False
    alive_at: datetime | None = None


class Workers(RuleBasedStateMachine):
    """Rules of workers; the subclass has the clock, the schedulers and the invariants."""

    def hire_worker(self):
        self.names = getattr(self, "names", 0) + 1
        return Worker(f"worker-{self.names}")

    def dispatch(self, worker, command, *arguments, maintenance=False):
        """Run Dramatiq's own script at the machine's time."""
        milliseconds = round(self.now.timestamp() * 1000)
        dead_after = round(self.configured.dead_after.total_seconds() * 1000)
        limits = (dead_after, DEFAULT_DEAD_MESSAGE_TTL, int(maintenance), 7_000)
        return broker.scripts["dispatch"](
            args=[command, milliseconds, BATCH.queue, worker.name, *limits, *arguments], keys=[broker.namespace]
        )

    @property
    def idle(self):
        return [worker for worker in self.workers if worker.message is None]

    @property
    def holding(self):
        return [worker for worker in self.workers if worker.message and not worker.run and not worker.ended]

    @property
    def running(self):
        return [worker for worker in [*self.workers, self.terminal] if worker.run is not None]

    @property
    def ended(self):
        return [worker for worker in self.workers if worker.ended]

    @precondition(lambda self: self.idle)
    @rule(pick=picks, rescue=st.booleans())
    def a_worker_takes_a_message(self, pick, rescue):
        self.take(pick(self.idle), rescue=rescue)

    def take(self, worker, *, rescue):
        self.fetch(worker, rescue=rescue)
        if worker.message is not None:
            self.start(worker)

    @precondition(lambda self: self.idle)
    @rule(pick=picks, rescue=st.booleans())
    def a_worker_prefetches_a_message(self, pick, rescue):
        self.fetch(pick(self.idle), rescue=rescue)

    def fetch(self, worker, *, rescue):
        for body in self.dispatch(worker, "fetch", 1, maintenance=rescue):
            if body is not None:
                worker.message = Message.decode(body)

    @precondition(lambda self: self.holding)
    @rule(pick=picks)
    def a_worker_starts_its_message(self, pick):
        self.start(pick(self.holding))

    def start(self, worker):
        number, token = int(worker.message.message_id), UUID(worker.message.options[TOKEN_OPTION])
        run = JobRun.start(NAME, number, token=token, by=worker.name)
        if run is None:
            self.end(worker)
            self.acknowledge(worker)
        else:
            assert not self.paused, "a run of a paused batch was started"
            self.begin_attempt(worker, run)

    def begin_attempt(self, worker, run):
        assert run.token not in self.tokens, "an attempt's token was given twice"
        self.tokens.add(run.token)
        self.world.owners[run.id] = run.token
        worker.run, worker.alive_at = run, self.now

    def end(self, worker):
        worker.run, worker.alive_at, worker.ended = None, None, worker.message is not None

    def check_ours(self, run):
        assert self.world.owners.get(run.id) == run.token, "a lost attempt was told that it owns its run"

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def a_heart_beats(self, pick):
        worker = pick(self.running)
        if JobRun.keep_alive([worker.run]) == {worker.run.id}:
            self.check_ours(worker.run)
            worker.alive_at = self.now
        else:
            self.end(worker)

    @precondition(lambda self: self.running)
    @rule(
        pick=picks,
        how=st.sampled_from(["succeeds", "fails", "is blocked"]),
        delay=st.sampled_from([0, 15, 3_600]),
        retries=st.sampled_from([25, 25, 0]),
        acknowledge=st.booleans(),
    )
    def a_run_ends(self, pick, how, delay, retries, acknowledge):
        worker = pick(self.running)
        if how == "succeeds":
            self.succeed(worker)
        elif how == "fails":
            self.close(worker, JobRun.fail(worker.run, "Oops", delay=timedelta(seconds=delay), retries=retries))
        else:
            self.close(worker, JobRun.block(worker.run, {}, reason="clocks", sentence="the clocks are apart"))
        if acknowledge:
            self.acknowledge(worker)

    def succeed(self, worker):
        self.close(worker, JobRun.succeed(worker.run, {"deleted": 1}))

    def close(self, worker, state):
        if state is not None:
            self.check_ours(worker.run)
        if state == "succeeded":
            self.world.successes[worker.run.id] += 1
        self.end(worker)

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def a_worker_acknowledges(self, pick):
        self.acknowledge(pick(self.ended))

    def acknowledge(self, worker):
        if worker.message is not None:
            self.dispatch(worker, "ack", worker.message.options["redis_message_id"])
        worker.message, worker.ended = None, False

    @precondition(lambda self: self.running or self.holding or self.ended)
    @rule(pick=picks)
    def a_worker_is_killed(self, pick):
        self.kill(pick([*self.running, *self.holding, *self.ended]))

    def kill(self, worker):
        if worker is self.terminal:
            self.terminal = Worker("terminal")
        else:
            self.workers[self.workers.index(worker)] = self.hire_worker()

    @precondition(lambda self: self.running and self.idle)
    @rule(pick=picks)
    def a_silent_worker_is_replaced(self, pick):
        self.set_clock(self.now + self.configured.dead_after + timedelta(seconds=1))
        self.a_scheduler_fires(None)
        self.take(pick(self.idle), rescue=True)
