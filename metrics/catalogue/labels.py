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


def series(declared: Iterable[Any]) -> dict[str, Children | None]:
    """Return the label sets of the batches and children that are *declared*, each in the order of declaration."""
    declared = tuple(declared)
    parents = [one for one in declared if one.parent is None]
    names, of_parents = [one.name for one in declared], [one.name for one in parents]
    in_families = [one for parent in parents for one in declared if parent.name in (one.name, one.parent)]
    queues = list(dict.fromkeys(one.queue for one in in_families))
    fan_outs = tuple((one.parent, one.name) for one in declared if one.parent is not None)
    records = [(one.name, record) for one in declared for record in one.records]

    def of(wanted: Callable[[Any], object]) -> Children:
        return tuple((name, record.name) for name, record in records if wanted(record))

    return {
        # Root names are as configured.
        "unbounded": None,
        "each": each(names),
        "parents": each(of_parents),
        "queues": each(queues),
        "collectors": each((*COLLECTORS, *(name for one in declared for name in one.collectors))),
        "levels": each(LEVELS),
        "operations": each(OPERATIONS),
        "clocks": CLOCKS,
        "info": tuple((one.name, str(one.document or "none"), one.queue, one.team) for one in declared),
        "failures": each(names, ERROR_KINDS),
        "skips": each(names, SKIPS),
        "holds": each(of_parents, HOLDS),
        "blocks": each(of_parents, BLOCKS),
        "offs": each(of_parents, OFFS),
        "depths": each(queues, ("ready", "unacked", "delayed")),
        "dead": each((*names, NO_BATCH)),
        "dead_letters": tuple((one.queue, one.name) for one in declared) + each(queues, [NO_BATCH]),
        "flags": each(flag for one in parents for flag in one.flags),
        "leases": each(one.name for one in declared if one.lease),
        "children": fan_outs,
        "quarantined": (*of(lambda record: record.quarantined), *fan_outs, UNREADABLE),
        "thresholds": tuple((one.name, limit.name) for one in declared for limit in one.thresholds),
        "examined": of(lambda record: record.examined),
        "processed": of(lambda record: record.processed),
        "objectives": of(lambda record: record.objective is not None),
        "backlogs": of(lambda record: record.objective is not None or record.backlog),
        "errors": tuple((name, record.name, kind) for name, record in records for kind in record.errors),
    }
