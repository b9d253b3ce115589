"""The documents: a batch a module, or a folder where it needs more than one file.

Importing this package declares them all, in the order in which they are shown.
"""

from workers import (  # noqa: F401, isort: skip
    user_status_cleanup,
    git_ref_cleanup,
    expired_job_artifacts,
    delete_objects,
    stale_direct_uploads,
    stale_imports,
    prune,
)
