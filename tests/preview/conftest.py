"""What a test of previews declares is forgotten after it, and it opens no store of an earlier one's."""

import pytest

from forgekeeper.targets import stores
from tests.harness.toys import forget_declarations


@pytest.fixture(autouse=True)
def apart():
    """Forget batches and stores."""
    stores.open_object_store.cache_clear()
    with forget_declarations():
        yield
    stores.open_object_store.cache_clear()
