"""Patch of `prometheus_client.values.MmapedDict`: files to count in, with room for all that will be counted.

Those of prometheus_client 0.26.0 are sparse.  Where the disk has no room for a page of a mapped file, that is no error:
the kernel ends whoever writes there.  So each file gets its room when it is made.  A process for whose file there is
none counts in memory: it goes on, and only the endpoint lacks its share.  It may go when
`test_the_clients_files_have_no_room_of_their_own` in `tests/engine/test_patches.py` fails.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from metrics.threads import Thread

ROOM = 1 << 17
"""Bytes; more than all series of one process need, for a file that grows asks nobody whether there is room."""

log = structlog.get_logger(__name__)


class RoomyFile(MmapedDict):
    """A file of values that does not run out of room."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:  # noqa: FBT001, FBT002, the client's arguments
        try:
            if not read_mode:
                reserve(Path(filename))
        except OSError as error:
            # In a thread of its own: the client holds its lock, and lines are counted, too.
            facts = {"file": Path(filename).name, "error": error.strerror}
            with suppress(RuntimeError):  # no thread can be had: then it is not said
                Thread(partial(log.warning, "counting in memory", **facts), timeout=1).start()
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
