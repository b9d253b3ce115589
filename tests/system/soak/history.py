"""What users did and what was seen meanwhile, and how things stood in the end.

An operation whose end nobody saw counts as *maybe*.  Times are the database's, in seconds.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Operation:
    """Something that was done to *subject* between *began* and *ended*: ok, no, failed (not done) or maybe."""

    subject: str
    do: str
    args: dict
    began: float
    ended: float = float("inf")
    outcome: str = "maybe"
    value: object = None

    def end(self, outcome, *, at=None, value=None):
        """Note what came of it."""
        self.outcome, self.value, self.ended = outcome, value, time.time() if at is None else at


class History:
    """Operations by their subject, in order, and samples by their kind, from any thread; a file of them in the end."""

    def __init__(self, path):
        self.operations, self.samples, self.looked = defaultdict(list), defaultdict(list), Counter()
        self._path = path

    def begin(self, subject, do, args=None, *, at=None):
        """Note what is about to be done."""
        operation = Operation(subject, do, args or {}, time.time() if at is None else at)
        self.operations[subject].append(operation)
        return operation

    def sample(self, kind, **facts):
        """Note something seen that a property asks about."""
        self.samples[kind].append({**facts, "db": time.time()})

    def look(self, kind):
        """Count one look that may or may not have found something: a property that nobody looked at is not kept."""
        self.looked[kind] += 1

    def close(self):
        """Write everything down for people who want to know more."""
        with self._path.open("w") as file:
            for one in (*self.operations.values(), *self.samples.values()):
                file.writelines(json.dumps(fact, default=vars) + "\n" for fact in one)


@dataclass
class Final:
    """How things stood when the faults had stopped and everything had had its time."""

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
    """What the store held after `uploads reconcile`, and below what the register and the rows named by then."""
    named_then: list = field(default_factory=list)
    runs: list = field(default_factory=list)
    """Rows of the ledger, times in seconds."""
    buckets: dict = field(default_factory=lambda: {"available": [], "occupied": [], "max": 0})
    effects: dict = field(default_factory=dict)
    """Record -> how many were changed by the workers that were started after the faults, and below how many they count."""
    counted: dict = field(default_factory=dict)
    stranded: list = field(default_factory=list)
    """What lay in Redis where no worker would find it, when all had ended."""
    changed_at_rest: list = field(default_factory=list)
    """What further runs changed although there was nothing to do."""
