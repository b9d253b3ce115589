"""What `forgekeeper --help` lists: each command's line, said again here so that none has to be imported for it.

That is what the commands say of themselves where the batches are our own: elsewhere they are asked.
"""

from __future__ import annotations

import os
from pathlib import Path

ASKING: tuple[list[str], ...] = ([], ["-h"], ["--help"])
BATCHES = "FORGEKEEPER_BATCHES"
OUR_OWN = {"", "workers"}
COMPLETING = "_FORGEKEEPER_COMPLETE"
"""With it in its environment the shell asks what may follow, which only the commands know."""

LINES = {
    "Serve": {
        "demo": "Show the whole system at work, on servers and data of its own, and clean up after it.",
        "up": "Run everything in this terminal: a scheduler, a worker for `cron` and `objects`, one for "
        "the children's queues.",
        "scheduler": "Keep the timetable: claim each batch's ticks and send them to the workers.",
        "worker": "Work through the messages of the queues.",
        "exporter": "Serve what is the case as metrics: backlogs, queues, leases, the last runs, asked for "
        "when scraped.",
    },
    "Prepare": {
        "check": "Check settings, servers, schema, schedules, repositories and object stores.",
        "migrate": "Apply pending migrations of forgekeeper's own tables; the forge's are never touched.",
        "settings": "List every setting with its type, default, present value, where that comes from, and sentence.",
        "metrics": "List every metric with its type, labels, unit and sentence.",
        "batches": "List what every batch has declared: document, schedule, limits, records, thresholds, "
        "settings, failpoints.",
        "seed": "Fill the database with sample data, beside what is there; make the example forge's tables first.",
    },
    "Run": {
        "run": "Run a batch here and now, and print its result.",
        "send": "Send a batch to the workers now, unless it is queued or running already.",
        "pause": "Start no run of these batches until that TIME, or until resumed.  A run that has started goes on.",
        "stop": "End every run and child of these batches before its next chunk, everywhere, and start "
        "none until resumed.",
        "cancel": "End one run before its next chunk, and its children; one that waits will not run.",
        "resume": "End your own pauses and stops of these batches; another person's with --by or --id.",
        "release": "Let batches go that a brake holds, from their next tick on: as many records as are due now.",
        "flags": "Feature flags: list them, or turn one on or off for all processes.",
    },
    "Look": {
        "status": "Show every batch: what it is at, when it is due, its backlog, how its last run ended; and "
        "every queue.",
        "processes": "List the schedulers and workers that live or fell silent, and what each is at.",
        "ticks": "List a batch's ticks and runs by hand, newest first.",
        "why": "Tell the story of one tick: who ran it and what came of it, or why it never ran.",
        "audit": "Show what people did and what was deleted, newest first; or answer who deleted one thing, "
        "when and why.",
        "buckets": "Show the artifact buckets: which are free, and who has the others since when.",
        "redis": "Open `redis-cli` at the Redis of the settings, or let it do ARGS: `forgekeeper redis PING`.",
        "psql": "Open `psql` at the database of the settings, or let it do ARGS: `forgekeeper psql -c 'select 1'`.",
        "uploads": "Objects in a store that nobody answers for.",
        "objects": "Objects of deleted artifacts that must not be deleted.",
        "refs": "Git refs that were deleted wrongly.",
        "quarantine": "What failed by itself: it is left out until its next try, or until a person decides, and stops "
        "nothing else.",
        "leases": "Who works on what alone, and since when.",
    },
}
"""The first paragraph of each command's help, by panels, in the order in which they are shown."""


def suffices(arguments: list[str]) -> bool:
    """Say whether the list of all commands is asked for, and these are they."""
    return arguments in ASKING and COMPLETING not in os.environ and _batches() <= OUR_OWN and not _other_settings()


def _batches() -> set[str]:
    """Return what the environment gives as batches, in whatever case it writes the name."""
    return {value.strip() for name, value in os.environ.items() if name.upper() == BATCHES}


def _other_settings() -> bool:
    """Say whether a file here may name other batches."""
    try:
        return BATCHES.encode() in Path(".env").read_bytes().upper()
    except FileNotFoundError:
        return False
    except OSError:
        return True
