"""What a test of previews declares is forgotten after it, and it opens no store of an earlier one's."""

import pytest

from forgekeeper.targets import stores
from tests.harness.toys import declaring


@pytest.fixture(autouse=True)
def apart():
    """Forget batches and stores."""
    stores.opened.cache_clear()
    with declaring():
        yield
    stores.opened.cache_clear()
