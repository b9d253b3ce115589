"""Uploads that complete while they are reaped and Redis goes back again and again: on real servers, with real locks."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import peewee as pw
import pytest

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import sentinel, stores
from models import JobArtifact
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import uploads as register
from tests.harness.thorough import whole_only
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION, stale_direct_uploads
from workers.stale_direct_uploads import producer as direct_uploads

STALE = MAX_UPLOAD_DURATION.total_seconds() + 60
PRODUCERS, UPLOADS = 3, 60
KEYS = (
    register.keys.pending,
    register.keys.deleting,
    register.keys.claims,
    register.keys.attempts,
    register.keys.failed,
    register.keys.adopted,
)


@pytest.fixture
def places(database, tmp_path):
    """Two folders, for a location that a table names and one that none does, and the settings that lead there."""
    stores.open_object_store.cache_clear()
    places = {location: tmp_path / location for location in ("artifacts", "lfs")}
    urls = {location: f"file://{folder}" for location, folder in places.items()}
    for location, folder in places.items():
        folder.mkdir()
        sentinel.Store(location, urls[location]).create_sentinel(INSTALLATION)
    yield places, settings_with(object_stores=urls)
    stores.open_object_store.cache_clear()


def sweep(settings):
    perform(stale_direct_uploads, settings=settings)


def produce(places, settings, seed):
    """Upload some; return what was told True and committed, and how many were told False."""
    dice, kept, refused = random.Random(seed), set(), 0
    with database.connection_context():
        for number in range(UPLOADS):
            location, path = dice.choice(["artifacts", "lfs"]), f"{seed}/{number}"
            direct_uploads.prepare(client, location, path)
            put(places[location] / path)
            client.zadd(register.keys.pending, {f"{location}:{path}": client.time()[0] - STALE}, xx=True)
            if dice.random() < 0.1:
                sweep(settings)
            told = complete(location, path)
            kept |= {(location, path)} if told else set()
            refused += not told
    return kept, refused


def put(file):
    """Create a file and its folder, which a sweep may take away in between, as it does with empty ones."""
    while not file.exists():
        with suppress(FileNotFoundError):
            file.parent.mkdir(exist_ok=True)
            file.touch()


def complete(location, path):
    with database.atomic() as transaction:
        if location == "artifacts":
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)
        try:
            told = direct_uploads.complete(client, location, path)
        except pw.OperationalError:  # the lock was not to be had in time
            told = False
        if not told:
            transaction.rollback()
    return told


def keep_sweeping(settings, producing):
    with database.connection_context():
        while producing.is_set():
            sweep(settings)


def keep_going_back(producing):
    """Let the register be again what it was a moment ago; return how often."""
    times = 0
    while producing.is_set():
        then = [client.dump(key) for key in KEYS]
        moment = client.zcard(register.keys.pending)
        while producing.is_set() and client.zcard(register.keys.pending) == moment:
            pass
        with client.pipeline(transaction=True) as pipe:
            pipe.delete(*KEYS)
            for key, value in zip(KEYS, then, strict=True):
                if value is not None:
                    pipe.restore(key, 0, value)
            pipe.execute()
        times += 1
    return times


@whole_only
def test_no_upload_that_was_told_true_loses_its_object_though_redis_goes_back_all_the_time(places):
    folders, settings = places
    producing = threading.Event()
    producing.set()
    with ThreadPoolExecutor(PRODUCERS + 3) as threads:
        sweepers = [threads.submit(keep_sweeping, settings, producing) for _ in range(2)]
        back = threads.submit(keep_going_back, producing)
        producers = [threads.submit(produce, folders, settings, seed) for seed in range(PRODUCERS)]
        try:
            told = [producer.result() for producer in producers]
        finally:
            producing.clear()
        for sweeper in sweepers:
            sweeper.result()
    everything = {(place, f"{seed}/{n}") for place in folders for seed in range(PRODUCERS) for n in range(UPLOADS)}
    client.zadd(register.keys.pending, {f"{location}:{path}": 0 for location, path in everything})
    client.delete(register.keys.deleting, register.keys.claims)

    sweep(settings)  # of a register in which everything is pending again

    there = {(place, str(file.relative_to(folder))) for place, folder in folders.items() for file in folder.glob("*/*")}
    assert there == set().union(*(kept for kept, _ in told))
    assert min(back.result(), len(there), sum(refused for _, refused in told), SettledUpload.select().count()) > 10
