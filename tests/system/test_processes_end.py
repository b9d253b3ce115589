"""Every process that serves ends when it is told to, whatever is away: how long that takes."""

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
READY = {
    "worker": "worker ready",
    "scheduler": "scheduler ready",
    "exporter": "exporter started",
    "up": "exporter started",
}
ARGUMENTS = {"worker": ("--processes", "1", "--threads", "2")}
OFTEN = {"poll_interval": "0.2", "dead_after": "3", "log_format": "json"}
BOTH = ("redis", "postgres")
EACH = ("worker", "scheduler", "exporter")
CASES = {
    "Redis hangs": (("worker", "scheduler"), ("redis",), "black_hole"),
    "PostgreSQL hangs": (EACH, ("postgres",), "black_hole"),
    "both refuse": (EACH, BOTH, "refuse"),
    # It starts one of each, and ends after them.
    "both hang": (("up",), BOTH, "black_hole"),
}


@pytest.fixture
def proxies(urls):
    """Proxies before both servers, and the settings that lead through them."""
    (redis, redis_url), (postgres, postgres_url) = redis_through(urls.redis), postgres_through(urls.database)
    with redis, postgres:
        yield {"redis": redis, "postgres": postgres}, {"redis_url": redis_url, "database_url": postgres_url}


def eventually(condition):
    assert wait_until(condition, LIMIT), "it did not come to that in time"


def said(service, message):
    return [line for line in service.lines() if line.get("message") == message]


def take_away(proxies, names, how):
    """Let these servers hang or refuse everything, and wait until somebody has noticed."""
    for name in names:
        getattr(proxies[name], how)()
        if how == "refuse":
            proxies[name].cut()
    if how == "black_hole":
        eventually(lambda: all(proxies[name].unread() for name in names))


def seconds_to_end(services):
    """Tell each to end; say how long each took, without what the machine held it up."""
    held_up = Held(lambda: [service.process.pid for service in services])
    told_at = time.monotonic()
    for service in services:
        service.process.send_signal(signal.SIGTERM)
    ended = dict.fromkeys((service.name for service in services), inf)

    def all_have():
        for service in services:
            if ended[service.name] == inf and service.process.poll() is not None:
                ended[service.name] = time.monotonic() - told_at
        return inf not in ended.values()

    wait_until(all_have, LIMIT)
    busy = held_up.seconds()
    return {name: seconds - busy for name, seconds in ended.items()}


@pytest.mark.parametrize("away", CASES)
def test_what_is_idle_ends_within_seconds_whichever_server_is_away(database, proxies, services, say, away):
    (kinds, *taken), (by_name, urls) = CASES[away], proxies
    port = str(free_ports(1)[0])
    running = [
        services(kind, kind, *ARGUMENTS.get(kind, ()), **OFTEN, **urls, metrics_port_exporter=port) for kind in kinds
    ]
    eventually(lambda: all(said(service, READY[service.name]) for service in running))
    if "up" in kinds:
        eventually(lambda: len(said(running[0], READY["worker"])) == 3 and said(running[0], READY["scheduler"]))
    take_away(by_name, *taken)

    seconds = seconds_to_end(running)

    told = ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())
    say(f"{away}, time to end: {told}")
    assert {name: took for name, took in seconds.items() if took > patient(PROMISED)} == {}
    assert {service.name: service.process.returncode for service in running} == dict.fromkeys(kinds, 0)
