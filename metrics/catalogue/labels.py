"""The values that labels have: those that are fixed, and those that follow from what is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from metrics.catalogue.metric import Children

NO_BATCH = "unknown"
"""The batch of a dead letter that is no message, or is of no batch: it is somebody's lost work all the same."""
UNREADABLE = (NO_BATCH, "message")
"""What lies in quarantine and is of no batch: messages that nothing can read."""
LEVELS = ("debug", "info", "warning", "error", "critical")
ERROR_KINDS = (
    *("database", "redis", "object_storage", "gitaly"),
    *("feature_flag", "state_transition", "time_limit", "other"),
)
BLOCKS = ("no_store", "no_repositories", "flag_unreadable", "installation", "clocks", "schema")
"""Why a batch may be blocked: what only a person can fix."""
HOLDS = ("breaker", "new")
"""Why a batch may be held: a run would have been out of proportion, or nobody has looked at what it would do yet."""
OFFS = ("flag_off", "cron_off")
SKIPS = ("overlap", "paused", "stopped", "held", "cancelled", "lease_held", "duplicate", "flag_off", *BLOCKS)
OPERATIONS = ("get", "delete", "delete_many")
COLLECTORS = ("batches", "runs", "flags", "queues", "dead_letters", "leases", "roots", "quarantine", "clocks")
"""What the exporter asks, beside what batches bring."""
CLOCKS = (("postgresql", "host"), ("postgresql", "redis"), ("redis", "host"))
"""Which clock is compared with which; the host is the exporter's."""


def each(*values: Iterable[str]) -> Children:
    """Combine every value of a label with every one of the others."""
    return tuple(product(*values))


class Labels:
    """The label sets of the batches and children that are *declared*, each in the order of declaration."""

    def __init__(self, declared: Iterable[Any]) -> None:
        self.declared = tuple(declared)
        parents = [one for one in self.declared if one.parent is None]
        families = [(one, *(child for child in self.declared if child.parent == one.name)) for one in parents]
        self.names = tuple(one.name for one in self.declared)
        self.parents = tuple(one.name for one in parents)
        self.queues = tuple(dict.fromkeys(one.queue for family in families for one in family))
        self.collectors = (*COLLECTORS, *(name for one in self.declared for name in one.collectors))
        fan_outs = tuple((one.parent, one.name) for one in self.declared if one.parent is not None)
        self.series: dict[str, Children | None] = {
            # Root names are as configured.
            "unbounded": None,
            "each": each(self.names),
            "parents": each(self.parents),
            "queues": each(self.queues),
            "collectors": each(self.collectors),
            "levels": each(LEVELS),
            "operations": each(OPERATIONS),
            "clocks": CLOCKS,
            "info": tuple((one.name, str(one.document or "none"), one.queue, one.team) for one in self.declared),
            "failures": each(self.names, ERROR_KINDS),
            "skips": each(self.names, SKIPS),
            "holds": each(self.parents, HOLDS),
            "blocks": each(self.parents, BLOCKS),
            "offs": each(self.parents, OFFS),
            "depths": each(self.queues, ("ready", "unacked", "delayed")),
            "dead": each((*self.names, NO_BATCH)),
            "dead_letters": tuple((one.queue, one.name) for one in self.declared) + each(self.queues, [NO_BATCH]),
            "flags": each(flag for one in parents for flag in one.flags),
            "leases": each(one.name for one in self.declared if one.lease),
            "children": fan_outs,
            "quarantined": (*self._records(lambda record: record.quarantined), *fan_outs, UNREADABLE),
            "thresholds": tuple((one.name, limit.name) for one in self.declared for limit in one.thresholds),
            **self._of_records(),
        }

    def _of_records(self) -> dict[str, Children]:
        return {
            "examined": self._records(lambda record: bool(record.examined)),
            "processed": self._records(lambda record: bool(record.processed)),
            "objectives": self._records(lambda record: record.objective is not None),
            "backlogs": self._records(lambda record: record.objective is not None or record.backlog),
            "errors": tuple(
                (one.name, record.name, kind)
                for one in self.declared
                for record in one.records
                for kind in record.errors
            ),
        }

    def _records(self, wanted: Callable[[Any], bool]) -> Children:
        return tuple((one.name, record.name) for one in self.declared for record in one.records if wanted(record))
