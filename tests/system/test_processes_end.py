"""Every process that serves ends when it is asked to, also while its servers are away: how long that takes."""

import signal
import time
from math import inf

import pytest

from tests.harness.machine import Held
from tests.harness.ports import free_ports
from tests.harness.waiting import patient, wait_until

from .proxy import postgres_through, redis_through

PROMISED = 5.0
"""Seconds that an idle process may take."""
LIMIT = 60.0
READY = {"worker": "worker ready", "scheduler": "scheduler ready", "exporter": "exporter started"}
ARGUMENTS = {"worker": ("--processes", "1", "--threads", "2")}
OFTEN = {"poll_interval": "0.2", "dead_after": "3", "log_format": "json"}


@pytest.fixture
def away(urls):
    """Take both servers from the processes that use these settings, once somebody has noticed."""
    (redis, redis_url), (postgres, postgres_url) = redis_through(urls.redis), postgres_through(urls.database)

    def take(how):
        for proxy in (redis, postgres):
            getattr(proxy, how)()
            if how == "refuse":
                proxy.cut()
        assert how == "refuse" or wait_until(lambda: redis.unread() and postgres.unread(), LIMIT)

    with redis, postgres:
        yield {"redis_url": redis_url, "database_url": postgres_url}, take


def seconds_to_end(services):
    """Ask each to end; return how long each took, without what the machine held it up."""
    held_up = Held(lambda: [service.process.pid for service in services])
    asked_at = time.monotonic()
    for service in services:
        service.process.send_signal(signal.SIGTERM)
    ended = dict.fromkeys((service.name for service in services), inf)

    def all_have():
        for service in services:
            if ended[service.name] == inf and service.process.poll() is not None:
                ended[service.name] = time.monotonic() - asked_at
        return inf not in ended.values()

    wait_until(all_have, LIMIT)
    busy = held_up.seconds()
    return {name: seconds - busy for name, seconds in ended.items()}


@pytest.mark.parametrize("how", ["black_hole", "refuse"])
def test_what_is_idle_ends_within_seconds_while_both_servers_are_away(database, away, services, say, how):
    settings, take = away
    port = str(free_ports(1)[0])
    options = {**OFTEN, **settings, "metrics_port_exporter": port}
    running = [services(kind, kind, *ARGUMENTS.get(kind, ()), **options) for kind in READY]
    assert wait_until(lambda: all(service.said(READY[service.name]) for service in running), LIMIT)
    take(how)

    seconds = seconds_to_end(running)

    say(f"{how}, time to end: " + ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items()))
    assert {name: took for name, took in seconds.items() if took > patient(PROMISED)} == {}
    assert {service.name: service.process.returncode for service in running} == dict.fromkeys(READY, 0)
