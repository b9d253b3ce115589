"""What grew in the ordinary way is never held, what a mistake made is always: on many histories, drawn at random."""

import math
from dataclasses import replace
from datetime import timedelta
from random import Random

import peewee as pw
import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import BatchHeld
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.database import now
from forgekeeper.platform.database.queries import AffectedShare
from tests.harness.past_runs import add_past_runs
from tests.harness.settings import settings_with
from tests.harness.thorough import examples

STATUSES = BATCHES["user_status_cleanup"]
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
OUTAGES = [timedelta(minutes=20), HOUR, 9 * HOUR, DAY, 3 * DAY, timedelta(weeks=1), timedelta(weeks=3)]


class World:
    """A batch whose records become due at a rate that goes with the hour and the day of the week, and at random."""

    def __init__(self, seed):
        dice = self.dice = Random(seed)
        self.every = dice.choice([60, 300, 3600])
        self.mean = 10 ** dice.uniform(0, 4) / 300
        self.swing = dice.choice([0, 0.5, 0.9, 0.99])
        self.weekend = dice.choice([1, 0.3, 0.05])
        self.burst = dice.choice([0, 0, 5, 50])
        self.known = dice.choice([2.5, 8, 20]) * (2 if self.every > 60 else 0.3) * DAY
        self.away = dice.choice(OUTAGES)
        self.phase = dice.uniform(0, 7 * 86_400)

    def due(self, began, ended):
        """Count what becomes due between these seconds: noise, and a burst at each midnight."""
        middle = (began + ended) / 2 + self.phase
        rhythm = 1 + self.swing * math.sin(2 * math.pi * middle / 86_400)
        week = self.weekend if middle // 86_400 % 7 >= 5 else 1
        mean = self.mean * rhythm * week * (ended - began)
        midnights = (ended + self.phase) // 86_400 - (began + self.phase) // 86_400
        bursts = midnights * self.mean * 300 * self.burst
        return round(max(0, self.dice.gauss(mean + bursts, math.sqrt(mean) + 0.3 * mean)))

    def live(self):
        """Write down the runs until the outage; return what became due in it."""
        away = self.away.total_seconds()
        moments = [away + n * self.every for n in range(int(self.known.total_seconds() / self.every))]
        records = [self.due(-ago - self.every, -ago) for ago in moments]
        add_past_runs(STATUSES, moments, records)
        hours = range(0, int(away), 600)
        return sum(self.due(-away + n, -away + min(n + 600, away)) for n in hours), max(records)


def asked(due, of):
    stake = AffectedShare(due=lambda bound: min(due, bound), total=lambda _bound: of)
    given = settings_with(breaker_share=0.3)
    return breaker.check_run(replace(STATUSES, stake=lambda _now: stake), given, 10**9, now())


@pytest.mark.parametrize("seed", range(examples(200)))
def test_what_grew_in_the_ordinary_way_in_an_outage_is_never_held(database, seed):
    grown, _largest = World(seed).live()

    asked(grown, grown)  # all of the table, even


@pytest.mark.parametrize("seed", range(examples(200)))
def test_what_a_mistake_made_is_always_held(database, seed):
    world = World(seed)
    world.away = timedelta(seconds=world.every)
    grown, _ = world.live()
    newest = RunTotal.select(RunTotal.records).order_by(RunTotal.run.desc()).limit(breaker.COMPARED_RUNS)
    largest = max((row.records for row in newest), default=0)
    rate = float(RunTotal.select(pw.fn.sum(RunTotal.records)).scalar() or 0) / world.known.total_seconds()
    # Beyond the rule it is what comes in the ordinary way in the time since the last run: at most as much again.
    mistake = grown + 2_000 + 21 * largest + math.ceil(100 * rate * world.every)

    with pytest.raises(BatchHeld):
        asked(mistake, 2 * mistake)
