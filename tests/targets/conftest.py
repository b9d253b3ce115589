import pytest

from tests.harness.clocks import jump
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.stores import empty_s3, folder, machine_role, moto, objects, s3, s3_client, store

__all__ = ["empty_s3", "folder", "jump", "machine_role", "moto", "objects", "s3", "s3_client", "store"]


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    return BareRepository(root)
