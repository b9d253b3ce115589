"""What a preview shows is what a run then takes; and a preview writes nothing, anywhere."""

import os
import threading
from contextlib import closing

import hypothesis
import psycopg2
import pytest
from hypothesis import strategies as st

from forgekeeper.batches import BATCHES
from tests.harness.thorough import examples
from tests.preview.worlds import WORLDS, everything

WORLDS_EACH = int(os.environ.get("WORLDS", "60"))
"""Two hundred worlds for each batch take twelve minutes: ``WORLDS=200 THOROUGH=1``."""
KEYS = st.integers(1, 40)
GONE = "gone"
random_worlds = hypothesis.settings(
    max_examples=examples(WORLDS_EACH),
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)
every_world = pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.batch)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def session(urls):
    """Make sessions of somebody else's; *held* is one in a transaction, else each statement is committed."""
    with closing(psycopg2.connect(urls.database)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor


@pytest.fixture
def holder(urls):
    """A session of somebody else's that keeps its transaction open."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        yield cursor


def test_there_is_a_world_of_every_batch():
    assert {kind.batch for kind in WORLDS} == set(BATCHES)


def fill(world, session, records):
    world.empty()
    for key, way in records.items():
        world.put(session, key, way)


def ways_of(kind, *more):
    return st.sampled_from([*kind.ways, *more])


@every_world
def test_a_run_takes_what_the_preview_has_shown_and_that_has_written_nothing(kind, session, holder, tmp_path):
    world = kind(tmp_path)

    @random_worlds
    @hypothesis.given(records=st.dictionaries(KEYS, ways_of(kind), max_size=15), busy=st.sets(KEYS, max_size=4))
    def check(records, busy):
        fill(world, session, records)
        locked = {key for key in busy & records.keys() if getattr(world, "lockable", lambda _key: True)(key)}
        if world.locking and locked:
            world.lock(holder, locked)
        else:
            locked = set()
        before, present = everything(world.folders()), world.present()

        shown = world.previewed()

        assert everything(world.folders()) == before
        assert shown == {key for key, way in records.items() if kind.ways[way]} - locked
        world.run()
        assert present - world.present() == shown
        holder.connection.rollback()

    check()


@every_world
def test_what_a_run_takes_differs_from_the_preview_by_what_others_have_done_meanwhile(kind, session, tmp_path):
    world = kind(tmp_path)
    changes = st.lists(st.tuples(KEYS, ways_of(kind, GONE)), max_size=15)

    @random_worlds
    @hypothesis.given(records=st.dictionaries(KEYS, ways_of(kind), max_size=15), beside=changes, after=changes)
    def check(records, beside, after):
        fill(world, session, records)
        start = threading.Event()

        def change(those):
            for key, way in those:
                world.remove(session, key) if way == GONE else world.put(session, key, way)

        def write():
            start.wait()
            change(beside)

        writer = threading.Thread(target=write)
        writer.start()
        shown = world.previewed(alone=False, told=lambda _part: start.set())
        start.set()
        writer.join()
        change(after)
        present = world.present()

        world.run()

        last = dict([*beside, *after])
        kept = {key for key, way in last.items() if way == GONE or not kind.ways[way]}
        made_due = {key for key, way in last.items() if way != GONE and kind.ways[way]}
        assert present - world.present() == (shown - kept) | made_due

    check()
