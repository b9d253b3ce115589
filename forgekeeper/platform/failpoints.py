"""Failpoints, for tests only: places between two steps at which a process is killed, fails or waits.

The setting `failpoints` arms them; nothing else does.  They are written ``name=kill``, ``name=raise`` or
``name=sleep:SECONDS``, with commas between them; ``*2`` behind one means that it happens the first two times only, in
each process.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass

import structlog

WRITTEN = re.compile(r"(?P<name>[\w.]+)=(?P<action>kill|raise|sleep:(?P<seconds>\d+(?:\.\d+)?))(?:\*(?P<times>\d+))?")

log = structlog.get_logger(__name__)

_armed: dict[str, Fault] = {}
_struck: Counter[str] = Counter()


@dataclass(frozen=True)
class Fault:
    """What happens at a failpoint, and how often; None is every time."""

    action: str
    seconds: float = 0.0
    times: int | None = None


Failpoints = dict[str, Fault]
"""The faults of a process, by the name of the failpoint."""


def parse(text: str) -> Failpoints:
    """Read failpoints as they are written; raise `ValueError` where that makes no sense."""
    found: Failpoints = {}
    for part in filter(None, text.split(",")):
        match = WRITTEN.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not name=kill, name=raise or name=sleep:SECONDS, with *TIMES or not")
        times = int(match["times"]) if match["times"] else None
        found[match["name"]] = Fault(match["action"].partition(":")[0], float(match["seconds"] or 0), times)
    return found


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
    fault = _armed.get(name)
    if fault is None or _struck[name] == fault.times:
        return
    _struck[name] += 1
    log.warning("failpoint reached", name=name, action=fault.action)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "raise":
        raise FailpointReached(name)
    else:
        time.sleep(fault.seconds)
