"""Which objects are there: what is asked where a deletion was interrupted."""

import pytest

from forgekeeper.storage import sentinel
from forgekeeper.storage.objects import LOOKS, StoreUnavailable


def test_objects_that_are_there_are_told_from_those_that_are_not(store, objects):
    paths = [f"a/{number}" for number in range(2 * LOOKS + 1)]
    store.put(*paths[::2])

    assert objects(store).present(paths) == {path: number % 2 == 0 for number, path in enumerate(paths)}


def test_without_the_sentinel_nothing_is_believed_to_be_gone(store, objects):
    store.remove_sentinel()

    with pytest.raises(StoreUnavailable):
        objects(store).present(["a"])


def test_in_anothers_store_nothing_is_believed_to_be_gone(store, objects):
    store.write_sentinel(sentinel.text("d15c0"))

    with pytest.raises(StoreUnavailable):
        objects(store).present(["a"])
