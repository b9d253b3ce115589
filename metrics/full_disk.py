"""Metrics of a process if the disk is full: its files have their space from the start, or it counts in memory."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

METRICS_FILE_BYTES = 1 << 18
"""Bytes of a file: more than all series of a process need, as growth would not allocate."""
files_without_space: list[str] = []
"""Names of files without space on the disk."""


class AllocatedFile(MmapedDict):
    """Patch of `prometheus_client.values.MmapedDict`: a file with allocated disk space.

    Files of prometheus_client 0.26.0 are sparse: if the disk is full, the kernel kills a process that writes to a
    mapped page. This class allocates space for all series when it creates the file. If that fails, the process counts
    in memory and goes on; only the endpoint lacks its values. Remove the patch when
    `test_the_clients_files_have_no_room_of_their_own` in `tests/metrics/test_endpoint.py` fails.
    """

    def __init__(self, filename: str) -> None:
        try:
            with Path(filename).open("ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, METRICS_FILE_BYTES)
                except OSError:
                    file.truncate(0)
                    raise
            super().__init__(filename)  # type: ignore[no-untyped-call]
        except OSError:
            files_without_space.append(Path(filename).name)
            memory = os.memfd_create("metrics")
            os.truncate(memory, METRICS_FILE_BYTES)
            super().__init__(f"/proc/self/fd/{memory}")  # type: ignore[no-untyped-call]
            os.close(memory)
