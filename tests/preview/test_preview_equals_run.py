"""What a preview shows is what a run then takes; and a preview writes nothing, anywhere."""

import os
from contextlib import closing

import hypothesis
import psycopg2
import pytest
from hypothesis import strategies as st

from forgekeeper.api.batches import BATCHES
from tests.harness.git_samples import shorten_lock_timeouts
from tests.harness.thorough import examples
from tests.preview.world import everything
from tests.preview.worlds import WORLDS

WORLDS_EACH = int(os.environ.get("WORLDS", "60"))
"""Two hundred worlds for each batch take twelve minutes: ``WORLDS=200 THOROUGH=1``."""
KEYS = st.integers(1, 40)
random_worlds = hypothesis.settings(
    max_examples=examples(WORLDS_EACH),
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)
EXCLUDING = [(kind, what) for kind in WORLDS for what in kind.excluding]
every_world = pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.batch)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def holder(urls):
    """A session of somebody else's that keeps its transaction open."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        yield cursor


def test_there_is_a_world_of_every_batch():
    assert {kind.batch for kind in WORLDS} == set(BATCHES)


@every_world
def test_a_run_takes_what_the_preview_has_shown_and_that_has_written_nothing(kind, holder, tmp_path, monkeypatch):
    shorten_lock_timeouts(monkeypatch)
    world = kind(tmp_path)
    each_way_by_each_kind_of_key = dict(enumerate([way for way in kind.ways for _ in range(3)], 1))

    @random_worlds
    @hypothesis.example(records=each_way_by_each_kind_of_key, busy={1, 2, 3})
    @hypothesis.given(
        records=st.dictionaries(KEYS, st.sampled_from([*kind.ways]), max_size=15), busy=st.sets(KEYS, max_size=4)
    )
    def check(records, busy):
        world.empty()
        for key, way in records.items():
            world.put(key, way)
        locked = busy & records.keys() if world.locking else set()
        if locked:
            holder.execute(world.locking, {"keys": list(locked)})
        before, present = everything(world.folders()), world.present()

        shown = world.previewed()

        assert everything(world.folders()) == before
        assert shown == {key for key, way in records.items() if kind.ways[way]} - locked
        world.run()
        assert present - world.present() == shown
        holder.connection.rollback()

    check()


@pytest.mark.parametrize(("kind", "what"), EXCLUDING, ids=lambda part: part if isinstance(part, str) else part.batch)
def test_what_is_excluded_stays_all_else_goes_and_the_preview_says_both(kind, what, tmp_path, monkeypatch):
    shorten_lock_timeouts(monkeypatch)
    world = kind(tmp_path)
    world.empty()
    ways = dict(enumerate([way for way in kind.ways for _ in range(6)], 1))
    for key, way in ways.items():
        world.put(key, way)
    due = {key for key, way in ways.items() if kind.ways[way]}
    kept, present = {key for key in due if kind.excluding[what](key)}, world.present()

    world.exclude(what)
    shown, said = world.previewed(), world.kept("excluded")
    world.run()

    assert (shown, present - world.present()) == (due - kept, due - kept)
    # Of what lies outside nobody looks whether it would stay for another reason.
    assert said >= len(kept)
    assert bool(said) == bool(kept)
