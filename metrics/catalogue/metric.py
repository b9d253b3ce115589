"""What a metric is, what a batch declares of those that it alone has, and what is read of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

Process = Literal["worker", "scheduler", "exporter"]
Children = tuple[tuple[str, ...], ...]
Type = Literal["counter", "gauge", "histogram"]
BUCKETS: dict[str, tuple[float, ...]] = {
    "none": (),
    # The documents' limits are among them.
    "runs": (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 250.0, 300.0, 600.0, 1800.0),
    "requests": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
}
"""Upper edges of histograms' buckets, in seconds."""


@dataclass(frozen=True)
class Metric:
    """A metric; *children* are the label values that it ever has, None where the settings name them."""

    name: str
    labels: tuple[str, ...]
    children: Children | None
    help: str
    process: Process
    buckets: tuple[float, ...] = ()

    @property
    def type(self) -> Type:
        """Say what kind of metric it is."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def is_instant(self) -> bool:
        """Say whether its values are moments."""
        return self.name.endswith("_timestamp_seconds")

    @property
    def unit(self) -> str:
        """Name its unit, if it has one."""
        return "seconds" if self.name.endswith("_seconds") else ""

    @property
    def values(self) -> dict[str, tuple[str, ...] | None]:
        """Each label's values, in their order; None where the settings name them."""
        if self.children is None:
            return dict.fromkeys(self.labels)
        columns = list(zip(*self.children, strict=True)) or [()] * len(self.labels)
        return {label: tuple(dict.fromkeys(column)) for label, column in zip(self.labels, columns, strict=True)}


class Gauge(NamedTuple):
    """A gauge that a batch brings; *name* without the prefix, *children* the values that its labels ever have."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    children: Children = ((),)


class Counter(NamedTuple):
    """A counter that a batch brings; *name* without prefix and ending.

    It adds up *fields* of the outcome, or counts the runs that *stopped* so.  Its label is the batch, where *by_batch*.
    """

    name: str
    help: str
    fields: tuple[str, ...] = ()
    stopped: str | None = None
    by_batch: bool = True


class Reading(NamedTuple):
    """A value of a gauge, which is named without the prefix; *labels* in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


def at(metric: str, instant: datetime | None, *labels: str) -> Iterator[Reading]:
    """Yield the instant, nothing when there is none."""
    if instant is not None:
        yield Reading(metric, instant.timestamp(), labels)
