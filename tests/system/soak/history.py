"""What users did and what was seen meanwhile: a file of JSON lines, an intent and a result for each operation.

An operation whose end nobody saw counts as *maybe*.  Times are the database's, in seconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field


class History:
    """The file that operations and samples are written to, from any thread, as they happen."""

    def __init__(self, path):
        self.path = path
        self.looked = Counter()
        self.done = Counter()
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._number = 0

    def intend(self, subject, do, args, *, at):
        """Note what is about to be done; return its number."""
        with self._lock:
            self._number += 1
            self._write({"id": self._number, "subject": subject, "do": do, "args": args, **_times(at)})
            return self._number

    def result(self, number, subject, do, outcome, *, at, value=None):
        """Note what came of it: ok, no, failed (not done, whatever the state) or maybe."""
        with self._lock:
            self.done[f"{subject.partition(':')[0]} {do}", outcome] += 1
            self._write({"id": number, "outcome": outcome, "value": value, **_times(at)})

    def sample(self, kind, **facts):
        """Note something seen that a property asks about."""
        with self._lock:
            self._write({"sample": kind, **facts, **_times(None)})

    def look(self, kind):
        """Count one look that may or may not have found something: a property that nobody looked at is not kept."""
        self.looked[kind] += 1

    def close(self):
        with self._lock:
            self._file.close()

    def _write(self, record):
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _times(at):
    return {"db": time.time() if at is None else at}


@dataclass
class Operation:
    """Something that was done to *subject* between *began* and *ended*."""

    subject: str
    do: str
    args: dict
    began: float
    ended: float = float("inf")
    outcome: str = "maybe"
    value: object = None


def read(path):
    """Return the operations by their subject, in their order, and the samples by their kind."""
    operations, samples = {}, defaultdict(list)
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            if "sample" in record:
                samples[record["sample"]].append(record)
            elif "do" in record:
                operations[record["id"]] = Operation(record["subject"], record["do"], record["args"], record["db"])
            else:
                operation = operations[record["id"]]
                operation.ended, operation.outcome, operation.value = (
                    record[name] for name in ("db", "outcome", "value")
                )
    found = defaultdict(list)
    for operation in operations.values():
        found[operation.subject].append(operation)
    return found, samples


@dataclass
class Final:
    """How things stood when the faults had stopped and everything had had its time.

    Keys are texts, as JSON has them.  *files_then* is what the store held after
    `uploads reconcile`, and what the register and the rows named by then.
    """

    now: float = 0.0
    statuses: dict = field(default_factory=dict)
    """User -> when the status clears itself, None for never."""
    imports: dict = field(default_factory=dict)
    """Subject (`import:1`, `entity:1`) -> [status, when it was touched]."""
    half_entities: list = field(default_factory=list)
    artifacts: dict = field(default_factory=dict)
    """Id -> [when it expires, locked, file type, path]."""
    wrong_statistics: list = field(default_factory=list)
    outbox: list = field(default_factory=list)
    """[path, when it is due, attempts]."""
    register: dict = field(default_factory=lambda: {"pending": {}, "deleting": {}, "failed": {}})
    requests: dict = field(default_factory=dict)
    """Id of a deletion -> [subject of its ref, expected oid, status, reason]."""
    old_requests: int = 0
    refs: dict = field(default_factory=dict)
    """Subject (`ref:1:refs/heads/a`) -> oid."""
    files: list = field(default_factory=list)
    files_then: list = field(default_factory=list)
    named_then: list = field(default_factory=list)
    runs: list = field(default_factory=list)
    """Rows of the ledger, times in seconds."""
    buckets: dict = field(default_factory=lambda: {"available": [], "occupied": [], "max": 0})
    effects: dict = field(default_factory=dict)
    """Record -> how many were changed by the workers that were started after the faults."""
    counted: dict = field(default_factory=dict)
    """Record -> how many those workers have counted."""
    stranded: list = field(default_factory=list)
    """What lay in Redis where no worker would find it, when all had ended."""
    changed_at_rest: list = field(default_factory=list)
    """What further runs changed although there was nothing to do."""
