"""Failpoints, for tests only: places between two steps that kill, fail or delay a process.

Only the setting `failpoints` arms them.  They are written ``name=kill``, ``name=raise`` or
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

FAILPOINT_PATTERN = re.compile(
    r"(?P<name>[\w.]+)=(?P<action>kill|raise|sleep:(?P<seconds>\d+(?:\.\d+)?))(?:\*(?P<times>\d+))?"
)

log = structlog.get_logger(__name__)

_armed: dict[str, Fault] = {}
_times_reached: Counter[str] = Counter()


@dataclass(frozen=True)
class Fault:
    """The action at a failpoint, and the number of times; None means every time."""

    action: str
    seconds: float = 0.0
    times: int | None = None


Failpoints = dict[str, Fault]
"""The faults of a process, by the failpoint's name."""


def parse_failpoints(text: str) -> Failpoints:
    """Parse failpoints; raise `ValueError` if the text is malformed."""
    found: Failpoints = {}
    for part in filter(None, text.split(",")):
        match = FAILPOINT_PATTERN.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is not a failpoint: write name=kill, name=raise or name=sleep:SECONDS, optionally"
                " followed by *TIMES"
            )
        times = int(match["times"]) if match["times"] else None
        found[match["name"]] = Fault(match["action"].partition(":")[0], float(match["seconds"] or 0), times)
    return found


class FailpointReached(Exception):
    """The error that a test requested at a failpoint."""


def arm_failpoints(failpoints: Failpoints) -> None:
    """Replace the armed failpoints of this process."""
    _armed.clear()
    _times_reached.clear()
    _armed.update(failpoints)
    if _armed:
        log.warning("failpoints armed", names=sorted(_armed))


def failpoint(name: str) -> None:
    """Kill the process, raise `FailpointReached` or wait, if the failpoint *name* is armed."""
    fault = _armed.get(name)
    if fault is None or _times_reached[name] == fault.times:
        return
    _times_reached[name] += 1
    log.warning("failpoint reached", name=name, action=fault.action)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "raise":
        raise FailpointReached(name)
    else:
        time.sleep(fault.seconds)
