"""All that a property may ask, and what the models say of each thing."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

from .history import Final, Operation
from .models import Artifact, Import, Ref, Status, Upload, Walk


@dataclass
class Evidence:
    """All that a property may ask."""

    operations: dict
    samples: dict
    looked: Counter
    final: Final
    logs: list = field(default_factory=list)
    secrets: tuple = ()
    periods: dict = field(default_factory=dict)
    """Batch -> seconds between two of its ticks."""
    longest: dict = field(default_factory=dict)
    """Batch -> seconds that a run may take: its budget, a chunk and a statement's time-out."""
    recoveries: list = field(default_factory=list)
    slowest_recovery: float = 60.0

    @cached_property
    def walks(self):
        """What the models say of each subject."""
        return {walk.subject: walk for walk in _walks(self)}

    @cached_property
    def emptied(self):
        """When Redis was emptied: pairs of beginning and end."""
        return [(one.began, one.ended) for one in self.done_to("redis", "flush") if one.outcome != "failed"]

    @cached_property
    def returns(self):
        """When a server went back, by its name."""
        return {
            server: [
                Return((keep.began, keep.ended), (back.began, back.ended))
                for keep, back in pairwise(self.done_to(server, "keep", "return"))
                if (keep.do, back.do) == ("keep", "return")
            ]
            for server in ("redis", "postgres")
        }

    def undone(self, server, operation):
        """Say whether that server may have gone back to before the operation."""
        return any(
            operation.ended >= one.kept[0] and operation.began <= one.returned[1] for one in self.returns[server]
        )

    def done_to(self, server, *what):
        """Return what was done to a server, in its order."""
        return [operation for operation in self.operations.get(server, ()) if operation.do in what]

    def frozen(self, server, began, ended):
        """Say for how many seconds between these moments the server was stopped."""
        spans = ((one.began, one.ended) for one in self.done_to(server, "freeze"))
        return sum(max(0.0, min(last, ended) - max(first, began)) for first, last in spans)

    def lines(self, message):
        """Yield the facts of the log lines with that message; a killed process's last one may be cut."""
        for log in self.logs:
            with log.open(errors="replace") as lines:
                for line in lines:
                    if f'"{message}"' in line:
                        with suppress(ValueError):
                            yield json.loads(line)

    def of(self, kind):
        """Yield the subjects of that kind and their operations."""
        for subject, operations in self.operations.items():
            if subject.partition(":")[0] == kind:
                yield subject, operations


@dataclass(frozen=True)
class Return:
    """A server restored from an earlier copy: the moments around the copy, and the moment of the restore."""

    kept: tuple
    returned: tuple


def _walks(evidence):
    final = evidence.final
    seen = {f"status:{user}": "never" if clears is None else clears for user, clears in final.statuses.items()}
    seen |= {f"artifact:{number}": row[:3] for number, row in final.artifacts.items()}
    seen |= {f"upload:{member}": "pending" for member in final.register["pending"]}
    seen |= final.imports | final.refs
    models = {"status": Status(), "import": Import(), "entity": Import(), "artifact": Artifact()}
    models |= {"upload": Upload(evidence.emptied), "ref": Ref(partial(evidence.undone, "postgres"))}
    for kind, model in models.items():
        for subject, operations in evidence.of(kind):
            last = Operation(subject, "read", {}, final.now, final.now, "ok", seen.get(subject))
            yield Walk(subject, [*operations, last], model, evidence.returns.get(model.server, ()))
