"""How far clocks are apart, and what a question that takes long can prove."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from forgekeeper import database as db
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.runs import preconditions
from forgekeeper.runs.preconditions import Blocked, Difference
from forgekeeper.settings import PREFIX

NAME = "user_status_cleanup"
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(("seconds", "exceeds"), [(61.5, True), (-61.5, True), (61.0, False), (-61.0, False)])
def test_what_the_way_to_the_servers_may_have_cost_does_not_count_against_a_clock(seconds, exceeds):
    assert Difference("postgresql", "redis", seconds, 1.0).exceeds(MINUTE) is exceeds


# Batches that delete


@pytest.fixture
def expired(database):
    """A status that expires in a minute."""
    database.execute_sql("insert into user_statuses (user_id, clear_status_at) values (1, now() + interval '1 minute')")
    return lambda: database.execute_sql("select count(*) from user_statuses").fetchone()[0]


@pytest.mark.parametrize("batch", BATCHES)
def test_no_batch_runs_while_the_clocks_of_postgresql_and_redis_are_apart(settings, ahead, batch):
    ahead(timedelta(days=1))
    db.database.execute_sql("set search_path = public, shifted, pg_catalog")

    with pytest.raises(Blocked) as blocked:
        preconditions.require(batch, settings)
    db.database.execute_sql("reset search_path")

    assert blocked.value.reason == "clocks"
    assert "set right the one that is wrong (FORGEKEEPER_CLOCK_TOLERANCE allows 60 s)" in str(blocked.value)


def test_a_status_lives_that_only_a_wrong_clock_calls_expired(settings, ahead, expired):
    url = ahead(timedelta(days=1))

    result = forgekeeper("run", NAME, "--json", url=url)

    assert (result.returncode, json.loads(result.stdout)["skipped"], expired()) == (3, "clocks", 1)


def test_a_redis_that_is_away_has_no_clock_to_be_compared_with(database, settings, monkeypatch):
    monkeypatch.setattr(client, "connection_pool", redis.ConnectionPool(port=1))

    preconditions.require(BATCHES[NAME], settings)


def forgekeeper(*arguments, url, tolerance="60"):
    environment = {**os.environ, f"{PREFIX}DATABASE_URL": url, f"{PREFIX}CLOCK_TOLERANCE": tolerance}
    return subprocess.run(
        [sys.executable, "-m", "forgekeeper.cli", *arguments],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
