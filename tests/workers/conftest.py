from tests.harness.ref_deletions import child, clean, configured, parent, repository, root
from tests.harness.stores import empty_s3, folder, moto, objects, s3, s3_client, store

__all__ = [
    "child",
    "clean",
    "configured",
    "empty_s3",
    "folder",
    "moto",
    "objects",
    "parent",
    "repository",
    "root",
    "s3",
    "s3_client",
    "store",
]
