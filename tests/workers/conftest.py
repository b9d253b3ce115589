import pytest

from forgekeeper.storage import sentinel, stores
from tests.harness.installation import INSTALLATION
from tests.harness.ref_deletions import child, clean, configured, parent, repository, root, small  # noqa: F401
from tests.harness.stores import Folder, empty_s3, folder, moto, objects, s3, s3_client, store  # noqa: F401


@pytest.fixture
def elsewhere(tmp_path):
    """A second store, a folder, for the location `lfs`."""
    elsewhere = Folder(tmp_path / "other")
    sentinel.Store("lfs", elsewhere.url).create_sentinel(INSTALLATION)
    return elsewhere


@pytest.fixture(autouse=True)
def restarted():
    """Every test is a process that has just started: it has opened no store."""
    stores.opened.cache_clear()
    yield
    stores.opened.cache_clear()
