"""Failpoints: places between two steps at which a test lets a process be killed, fail or wait.

They are written ``name=kill``, ``name=raise`` or ``name=sleep:SECONDS``, with commas between
them; ``*2`` behind one means that it happens the first two times only, in each process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

STEPS = ("run.closed", "tick.claimed", "tick.sent")
"""The engine's own failpoints, named for the step that has just been taken; those of batches are declared."""

WRITTEN = re.compile(r"(?P<name>[\w.]+)=(?P<action>kill|raise|sleep:(?P<seconds>\d+(?:\.\d+)?))(?:\*(?P<times>\d+))?")


@dataclass(frozen=True)
class Fault:
    """What happens at a failpoint, and how often; None is every time."""

    action: Literal["kill", "raise", "sleep"]
    seconds: float = 0.0
    times: int | None = None


class Failpoints(dict[str, Fault]):
    """The faults of a process, by the name of the failpoint."""


def parse(text: object, steps: Sequence[str]) -> Failpoints:
    """Read failpoints as they are written; raise `ValueError` where that makes no sense, or is none of *steps*."""
    assert isinstance(text, str), "failpoints come from the environment or from a default, both text"
    found = Failpoints()
    for part in filter(None, text.split(",")):
        match = WRITTEN.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not name=kill, name=raise or name=sleep:SECONDS, with *TIMES or not")
        if match["name"] not in steps:
            close = get_close_matches(match["name"], steps, n=1)
            raise ValueError(
                f"there is no failpoint {match['name']!r}" + (f" (did you mean {close[0]}?)" if close else "")
            )
        times = int(match["times"]) if match["times"] else None
        if match["seconds"]:
            found[match["name"]] = Fault("sleep", float(match["seconds"]), times)
        else:
            found[match["name"]] = Fault("kill" if match["action"] == "kill" else "raise", times=times)
    return found
