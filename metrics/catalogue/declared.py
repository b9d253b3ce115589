"""What the catalogue wants to know of a declared batch or child: the registry comes as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from metrics.catalogue.metric import Counter, Gauge

# mypy: disable-error-code="empty-body"
# ruff: noqa: D102, each is what it is called


class Record(Protocol):
    """A kind of record that is counted, due, or in quarantine."""

    @property
    def name(self) -> str: ...
    @property
    def examined(self) -> Sequence[str]: ...
    @property
    def processed(self) -> Sequence[str]: ...
    @property
    def errors(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def objective(self) -> timedelta | None: ...
    @property
    def backlog(self) -> bool: ...
    @property
    def quarantined(self) -> bool: ...


class Threshold(Protocol):
    """A number of a document's."""

    @property
    def name(self) -> str: ...
    @property
    def above(self) -> float: ...


class Collector(Protocol):
    """What the exporter asks."""

    @property
    def gauges(self) -> Sequence[Gauge]: ...


class Declared(Protocol):
    """A batch, or the child of the batch *parent*."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def document(self) -> int | None: ...
    @property
    def queue(self) -> str: ...
    @property
    def team(self) -> str: ...
    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def thresholds(self) -> Sequence[Threshold]: ...
    @property
    def counters(self) -> Sequence[Counter]: ...
    @property
    def collectors(self) -> Mapping[str, Collector]: ...
    @property
    def flags(self) -> Mapping[str, str]: ...
    @property
    def lease(self) -> bool: ...
