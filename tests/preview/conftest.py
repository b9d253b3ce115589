"""Separate the tests of previews: declarations and open stores end with each test."""

import pytest

from forgekeeper.targets import stores
from tests.harness.toys import forget_declarations


@pytest.fixture(autouse=True)
def apart():
    """Forget declared batches and open stores."""
    stores.open_object_store.cache_clear()
    with forget_declarations():
        yield
    stores.open_object_store.cache_clear()
