"""Readiness of a worker's process: the file that the worker's endpoint reads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from metrics.endpoint import MULTIPROC_DIR_VARIABLE, READY_SUFFIX


def mark_readiness(*, ready: bool) -> None:
    """Tell this worker's endpoint that this process is alive, and whether it takes messages."""
    folder = os.environ.get(MULTIPROC_DIR_VARIABLE)
    if folder:
        file = Path(folder) / f"{os.getpid()}{READY_SUFFIX}"
        with suppress(OSError):
            if ready:
                file.write_text(str(time.monotonic()))
            else:
                file.unlink(missing_ok=True)
