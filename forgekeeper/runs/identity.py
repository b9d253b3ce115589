"""The name of this process, as the ledger, the broker and the logs have it."""

from __future__ import annotations

import os
import socket


def identity() -> str:
    """Name this process: its host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
