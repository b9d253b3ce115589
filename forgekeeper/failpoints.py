"""Failpoints, for tests only: between two steps a process is killed, fails or waits.

The setting `failpoints` says where; nothing else arms one.  Unarmed, a failpoint is one look
into an empty dictionary.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import structlog

from forgekeeper.settings.failpoints import Failpoints, Fault

_armed: dict[str, Fault] = {}
_struck: Counter[str] = Counter()

log = structlog.get_logger(__name__)


class FailpointReached(Exception):
    """A test wanted an error at this place."""


def arm(failpoints: Failpoints) -> None:
    """Let these faults happen in this process, and no others."""
    _armed.clear()
    _struck.clear()
    _armed.update(failpoints)
    if _armed:
        log.warning("failpoints armed", names=sorted(_armed))


def failpoint(name: str) -> None:
    """Be killed, fail or wait here if a test wants it."""
    if name in _armed:
        _strike(name, _armed[name])


def _strike(name: str, fault: Fault) -> None:
    _struck[name] += 1
    if fault.times is not None and _struck[name] > fault.times:
        return
    log.warning("failpoint reached", name=name, action=fault.action)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "raise":
        raise FailpointReached(name)
    else:
        time.sleep(fault.seconds)
