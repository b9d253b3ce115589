"""Patch of `prometheus_client.values.MmapedDict`: files to count in, with room for all that will be counted.

Those of prometheus_client 0.26.0 are sparse.  Where the disk has no room for a page of a mapped file, the kernel kills
the process that writes there.  So each file gets its room when it is made, and a process that gets none counts in
memory: it goes on, and only the endpoint lacks its share.  The patch may go when
`test_the_clients_files_have_no_room_of_their_own` in `tests/delivery/test_patches.py` fails.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

ROOM = 1 << 18
"""Bytes; more than all series of one process need: a file that grows later does not ask whether there is room."""

lacking: list[str] = []
"""The files that there was no room for."""


class RoomyFile(MmapedDict):
    """A file of values that does not run out of room."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:  # noqa: FBT001, FBT002, the client's arguments
        try:
            if not read_mode:
                reserve(Path(filename))
        except OSError:
            lacking.append(Path(filename).name)
            memory = os.memfd_create("metrics")
            os.truncate(memory, ROOM)
            super().__init__(f"/proc/self/fd/{memory}")  # type: ignore[no-untyped-call]
            os.close(memory)
        else:
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]


def install() -> None:
    """Let this process count in them."""
    values.MmapedDict = RoomyFile  # type: ignore[attr-defined]


def reserve(path: Path) -> None:
    """Take the room; raise `OSError`, and leave an empty file or none, where there is not enough."""
    with path.open("ab") as file:
        if os.fstat(file.fileno()).st_size >= ROOM:
            return
        try:
            os.posix_fallocate(file.fileno(), 0, ROOM)
        except OSError:
            file.truncate(0)
            raise
