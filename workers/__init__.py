"""The batches, one module each; importing this package declares them in display order."""

import sys
from typing import Any, cast

from workers import (  # noqa: F401, isort: skip
    user_status_cleanup,
    git_ref_cleanup,
    expired_job_artifacts,
    delete_objects,
    stale_direct_uploads,
    stale_imports,
    prune,
)

# Until 0.4 the interface for producers was a module, and programs of forges may import it by that name.
cast("dict[str, Any]", sys.modules)["workers.stale_direct_uploads.producer"] = stale_direct_uploads.producer
