"""The documents: a batch a module, or a folder where it needs more than one file.

Importing this package declares them all, in the order in which they are shown.
"""

from workers import (  # isort: skip
    user_status_cleanup,
    git_ref_cleanup,
    expired_job_artifacts,
    delete_objects,
    stale_direct_uploads,
    stale_imports,
    prune,
)

__all__ = [
    "delete_objects",
    "expired_job_artifacts",
    "git_ref_cleanup",
    "prune",
    "stale_direct_uploads",
    "stale_imports",
    "user_status_cleanup",
]
