"""A child for each project: enqueued once, and deduplicated while all are on their way."""

from __future__ import annotations

from functools import partial
from math import ceil
from time import monotonic

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from benchmarks import sidekiq
from benchmarks.contest import Benchmark, Missing, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import CHILDREN
from forgekeeper.delivery import queues
from forgekeeper.engine.repository_children import MAX_PROJECTS_PER_MESSAGE
from forgekeeper.platform.connections import client
from forgekeeper.platform.settings import Settings

PROJECTS = 10_000
PAGE = 100
RUN = 1


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 10,000 projects; only ours are deduplicated."""
    projects = round(PROJECTS * scale)
    peers = (
        Peer("Sidekiq's push_bulk", partial(_sidekiq, servers, projects), 1.0),
        Peer("Dramatiq's group", partial(_dramatiq, servers, projects), 1.0),
        Peer("Celery's apply_async", partial(_celery, servers, projects), 1.0),
    )
    return [
        Benchmark("fan_out", "children/s", partial(_ours, servers, projects), peers),
        Benchmark(
            "fan_out_small",
            "children/s",
            partial(_ours, servers, projects, per_message=MAX_PROJECTS_PER_MESSAGE),
            peers[:1],
        ),
        Benchmark("fan_out_again", "children/s", partial(_ours, servers, projects, again=True), peers[:1]),
    ]


def _ours(servers: Servers, projects: int, *, again: bool = False, per_message: int = 1) -> float:
    with database_of(servers, "fan_out") as settings:
        client.flushdb()
        if again:
            assert _send(settings, projects, per_message) == EnqueueCounts(projects, 0)
        began = monotonic()
        sent = _send(settings, projects, per_message)
        seconds = monotonic() - began
        assert sent == (EnqueueCounts(0, projects) if again else EnqueueCounts(projects, 0)), sent
        queue = CHILDREN["clean_project_refs"].queue
        stored = client.llen(queues.ready_key(queue)), client.hlen(queues.bodies_key(queue))
        assert stored == (messages := ceil(projects / per_message), messages), "not all messages were put in"
        assert client.hlen(queues.QUEUED_CHILDREN_KEY) == projects, "not all children are known"
    return projects / seconds


def _send(settings: Settings, projects: int, per_message: int) -> EnqueueCounts:
    """Send the children of a run by pages, as the engine does."""
    from forgekeeper.delivery.broker import broker
    from forgekeeper.delivery.children import send_children

    child = CHILDREN["clean_project_refs"]
    keyed = [(f"{child.name}:{project}", (project,)) for project in range(1, projects + 1)]
    pages = [keyed[at : at + PAGE] for at in range(0, len(keyed), PAGE)]
    options = {"limit_depth": settings.queue_limit, "per_message": per_message}
    sent = [send_children(broker, RUN, child, page, **options) for page in pages]
    return EnqueueCounts(sum(one.enqueued for one in sent), sum(one.deduplicated for one in sent))


def _sidekiq(servers: Servers, projects: int) -> float:
    peer = _empty(servers)
    seconds = sidekiq.push(servers, "default", projects)
    assert peer.llen("queue:default") == projects, "not all jobs were put in"
    return projects / seconds


def _dramatiq(servers: Servers, projects: int) -> float:
    peer = _empty(servers)
    broker = RedisBroker(url=servers.redis_url)
    actor = dramatiq.actor(actor_name="nothing", broker=broker)(_nothing)
    began = monotonic()
    dramatiq.group([actor.message(project) for project in range(1, projects + 1)], broker=broker).run()
    seconds = monotonic() - began
    assert peer.hlen("dramatiq:default.msgs") == projects, "not all messages were put in"
    broker.close()
    return projects / seconds


def _celery(servers: Servers, projects: int) -> float:
    try:
        from celery import Celery
    except ImportError:
        raise Missing("pip install celery") from None
    peer = _empty(servers)
    with Celery("benchmark", broker=servers.redis_url.replace("unix://", "redis+socket://").split("?")[0]) as app:
        task = app.task(name="nothing", ignore_result=True)(_nothing)
        # Connecting and its imports are not measured.
        task.apply_async((0,), queue="warm")
        began = monotonic()
        for project in range(1, projects + 1):
            task.apply_async((project,))
        seconds = monotonic() - began
    assert peer.llen("celery") == projects, "not all tasks were put in"
    return projects / seconds


def _empty(servers: Servers) -> redis.Redis:
    peer = redis.Redis.from_url(servers.redis_url)
    peer.flushdb()
    return peer


def _nothing(_project: int) -> None:
    """Do nothing."""
