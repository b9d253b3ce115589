"""Histories of limits against the real PostgreSQL: kills, lost replies, failed settlements, midnight, a backup.

Each history interleaves children of a batch step by step.  A statement deletes a chunk of rows and settles it, chunk by
chunk of a reservation.  Objects and refs are deleted outside the database first, and settled afterwards.  The real
deletions are counted beside the totals: they never exceed the limit, whatever the totals say.
"""

import time
from collections import Counter
from datetime import timedelta
from random import Random

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import run_guard
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger.limits import Amount, RunTotal
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database.common_tables import append_tables
from tests.harness.settings import settings_with
from tests.harness.thorough import examples, whole_only

STATUSES = BATCHES["user_status_cleanup"]
HISTORIES = examples(2_000)
STEPS, CHILDREN, ROWS, CHUNK = 30, 3, 250, 20
DAY = timedelta(days=1)

TABLES = """
    create table if not exists doomed (id bigint primary key);
    truncate doomed; insert into doomed select generate_series(1, %s)
"""
DELETE = """
    with deleted as (
        delete from doomed where id = any(array(
            select id from doomed order by id limit %(limit)s for update skip locked
        )) returning id
    ){settled}
    select count(*) from deleted
"""


class Broken(Exception):
    """A settlement that fails, and takes its transaction with it."""


def broken(fault):
    """Fail what is settled in the transaction at hand, if that is the fault."""
    if fault == "rolled back":
        raise Broken


class World:
    """What has really gone, by run and by the day on which it was allowed; *today* and *run* are the present ones."""

    def __init__(self, dice):
        self.dice = dice
        self.limits = {"max_per_run": dice.randint(1, 120), "max_per_day": dice.randint(1, 200)}
        if dice.random() < 0.3:
            self.limits.pop(dice.choice(list(self.limits)))
        named = {f"{name}_{STATUSES.name}": value for name, value in self.limits.items()}
        self.settings = settings_with().model_copy(update=named)
        self.gone = Counter()
        self.run = self.today = 1
        self.children = [Child(self) for _ in range(CHILDREN)]
        self.backup = None

    def note(self, child, count):
        self.gone["run", child.of_run] += count
        self.gone["day", child.of_day] += count
        self.check()

    def check(self):
        for (kind, _which), count in self.gone.items():
            limit = self.limits.get(f"max_per_{kind}")
            assert limit is None or count <= limit, (kind, count, self.limits)

    def midnight(self):
        """Let everything that is of today be of yesterday."""
        move_days(1)
        for child in self.children:
            child.guard._of_row["limit_day"] = child.guard._of_row.get("limit_day", None) and (
                child.guard._of_row["limit_day"] - DAY
            )
        self.today += 1

    def next_run(self):
        self.run += 1
        for child in self.children:
            child.die()

    def save(self):
        rows = [row for (row,) in db.execute_sql("select id from doomed").fetchall()]
        totals = list(RunTotal.select().dicts())
        self.backup = rows, totals, Counter(self.gone), self.today

    def restore(self):
        """Bring back what was; who was at work then is gone."""
        if self.backup is None:
            return
        rows, totals, self.gone, day = self.backup[0], self.backup[1], Counter(self.backup[2]), self.backup[3]
        db.execute_sql("truncate doomed, run_totals")
        db.execute_sql("insert into doomed select unnest(%s::bigint[])", (rows,))
        if totals:
            RunTotal.insert_many(totals).execute()
        move_days(self.today - day)
        for child in self.children:
            child.die()


def move_days(days):
    """Let all totals be so many days older; by way of days that no other total has."""
    db.execute_sql("update run_totals set day = day - 10000")
    db.execute_sql("update run_totals set day = day + (10000 - %s::integer)", (days,))


class Child:
    """One that deletes, a step at a time: it reserves, then deletes, and something may come between."""

    def __init__(self, world):
        self.world = world
        self.die()

    def die(self):
        """Begin again, as a new attempt that knows nothing of the one before."""
        self.guard = RunGuard(STATUSES, self.world.settings, STATUSES.outcome(), self.world.run)
        self.granted, self.is_ahead = 0, False
        self.of_run, self.of_day = self.world.run, self.world.today

    def step(self, fault):
        if self.granted == 0:
            self.guard.stop_reason = None
            self.reserve_next_chunk(self.world.dice.randint(1, CHUNK))
        elif self.is_ahead or self.world.dice.random() < 0.5:
            self.delete_rows(fault)
            self.end_chunk(fault)
        else:
            self.delete_outside(fault)
            self.guard.leave_used()
            self.granted = 0

    def reserve_next_chunk(self, chunk):
        """Reserve one chunk, or several chunks for rows, as a run that has reserved less than a second ago."""
        self.is_ahead = self.world.dice.random() < 0.5
        if self.is_ahead:
            self.guard._reserved_at, self.guard._chunks = time.monotonic(), self.world.dice.choice([1, 2, 4])
            self.granted = self.guard.reserve_chunk(chunk) if self.guard.count_allowed(chunk) else 0
        else:
            self.granted = self.guard.reserve(chunk).records
        self.of_run, self.of_day = self.world.run, self.world.today

    def end_chunk(self, fault):
        """Continue with the rest of the reservation, give it back, or end without knowing how much of it is left."""
        if fault in ("nothing was sent", "reply lost"):
            self.die()
        elif fault == "none" and self.is_ahead and self.world.dice.random() < 0.8:
            self.granted = min(self.granted, self.guard.records_left or 0)
        else:
            self.guard.give_back()
            self.granted = 0

    def delete_rows(self, fault):
        """Delete rows by one statement: it is done whole or not at all, and its reply may be lost."""
        if fault == "nothing was sent":
            return
        text = DELETE.format(settled=append_tables(self.guard.build_settled_table("deleted")))
        try:
            with db.atomic():
                (count,) = db.execute_sql(text, {"limit": self.granted} | self.guard.settlement_values()).fetchone()
                broken(fault)
        except Broken:
            return
        self.world.note(self, count)
        if fault != "reply lost":
            self.guard.note_settled(Amount(count), of_reserved=count)

    def delete_outside(self, fault):
        """Delete some of what was granted outside, and settle it; what went stays gone whatever becomes of that."""
        count = self.world.dice.randint(0, self.granted)
        if fault != "nothing was sent":
            self.world.note(self, count)
        if fault in ("nothing was sent", "rolled back"):
            return
        with db.atomic():
            self.guard.settle(Amount(count))
        if fault != "reply lost":
            self.guard.note_settled(Amount(count))


FAULTS = ("none", "none", "none", "nothing was sent", "rolled back", "reply lost")


@pytest.fixture
def doomed(database):
    yield
    db.execute_sql("drop table if exists doomed")


@whole_only
@pytest.mark.usefixtures("doomed")
@pytest.mark.parametrize("part", range(20))
def test_no_history_deletes_more_than_a_limit_and_none_is_stuck(part, monkeypatch):
    monkeypatch.setattr(run_guard, "RESERVATIONS_IN_REST", 2)
    for seed in range(part * HISTORIES // 20, (part + 1) * HISTORIES // 20):
        dice = Random(seed)
        db.execute_sql(TABLES, (ROWS,))
        RunTotal.delete().execute()
        world = World(dice)
        for _ in range(STEPS):
            happens = dice.random()
            if happens < 0.02:
                world.midnight()
            elif happens < 0.05:
                world.next_run()
            elif happens < 0.08:
                world.save()
            elif happens < 0.10:
                world.restore()
            elif happens < 0.15:
                dice.choice(world.children).die()
            else:
                dice.choice(world.children).step(dice.choice(FAULTS))
        world.midnight()
        world.next_run()
        (left,) = db.execute_sql("select count(*) from doomed").fetchone()
        assert all_of_a_new_limit(world) == min(*world.limits.values(), left), f"seed {seed}"


def all_of_a_new_limit(world):
    """Delete in a run of a new day until a limit is reached or no row is left; return how many went."""
    child, before = world.children[0], world.gone["run", world.run]
    while True:
        child.granted = child.guard.reserve(CHUNK).records
        if not child.granted:
            break
        gone = world.gone["run", world.run]
        child.delete_rows("none")
        if world.gone["run", world.run] == gone:
            break
    return world.gone["run", world.run] - before
