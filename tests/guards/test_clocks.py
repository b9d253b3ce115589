"""How far clocks are apart, and what a question that takes long can prove."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import preconditions
from forgekeeper.guards.preconditions import ClockDifference
from forgekeeper.platform.connections import client
from forgekeeper.platform.settings import PREFIX
from tests.harness.thorough import whole_only

NAME = "user_status_cleanup"
ROOT = str(Path(__file__).parents[2])
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(("seconds", "exceeds"), [(61.5, True), (-61.5, True), (61.0, False), (-61.0, False)])
def test_what_the_way_to_the_servers_may_have_cost_does_not_count_against_a_clock(seconds, exceeds):
    assert ClockDifference("postgresql", "redis", seconds, 1.0).exceeds(MINUTE) is exceeds


# Batches that delete


@whole_only
def test_a_status_lives_that_only_a_wrong_clock_calls_expired(database, settings, url_with_clock_ahead):
    database.execute_sql("insert into user_statuses (user_id, clear_status_at) values (1, now() + interval '1 minute')")
    own = {f"{PREFIX}DATABASE_URL": url_with_clock_ahead(timedelta(days=1)), f"{PREFIX}CLOCK_TOLERANCE": "60"}
    command = [sys.executable, "-m", "forgekeeper.cli", "run", NAME, "--json"]

    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT, **own}, capture_output=True, check=False)

    found = json.loads(result.stdout)
    left = database.execute_sql("select count(*) from user_statuses").fetchone()[0]
    assert (result.returncode, found["skipped"], left) == (3, "clocks", 1)
    assert "correct the wrong clock (FORGEKEEPER_CLOCK_TOLERANCE allows 60 s)" in found["blocked"]


def test_a_redis_that_is_away_has_no_clock_to_be_compared_with(database, settings, monkeypatch):
    monkeypatch.setattr(client, "connection_pool", redis.ConnectionPool(port=1))

    preconditions.require_met(BATCHES[NAME], settings)
