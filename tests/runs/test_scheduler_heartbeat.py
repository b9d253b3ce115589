"""A scheduler whose clock runs while PostgreSQL does not answer keeps no timetable, and its heartbeat says so."""

import threading
import time
from datetime import timedelta
from queue import SimpleQueue

import pytest
from apscheduler.schedulers.blocking import BlockingScheduler
from pydantic import SecretStr

from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, connect
from forgekeeper.database import database
from forgekeeper.runs.reconcile import COUNT
from scheduler import Loop, _keep_heartbeat
from tests.system.proxy import postgres_through


@pytest.mark.usefixtures("_migrated")
def test_a_scheduler_s_heartbeat_is_as_old_as_the_turn_that_gets_no_answer(urls, settings):
    proxy, url = postgres_through(urls.database)
    with proxy:
        own = settings.model_copy(update={"database_url": SecretStr(url), "scheduler_timeout": timedelta(seconds=1)})
        connect(own, Limits.of_scheduler(own), name="tests", connections=None)
        loop = Loop(BATCHES["user_status_cleanup"], own, broken=threading.Event(), asked=SimpleQueue())
        clock = BlockingScheduler(timezone="UTC")
        _keep_heartbeat(clock, [loop])

        def age():
            clock.get_job("heartbeat").func()
            return time.time() - COUNT.registry.get_sample_value("forgekeeper_scheduler_heartbeat_timestamp_seconds")

        loop.turn()
        assert loop.stands_still == 0
        database.close()
        proxy.black_hole()
        loop.turn()
        assert loop.stands_still >= 1
        assert age() >= 1
        proxy.passing()
        loop.turn()
        assert loop.stands_still == 0
        database.close()
