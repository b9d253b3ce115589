"""The catalogue in a file: the process that is the endpoint of a worker's processes loads no batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from metrics.catalogue import table
from metrics.catalogue.metric import Metric

FILE = "catalogue.json"

log = structlog.get_logger(__name__)


def write(folder: Path, metrics: Mapping[str, Metric]) -> None:
    """Leave the table of all metrics in *folder*, unless the disk is full: then the endpoint lacks batches' zeros."""
    written = folder / FILE
    try:
        written.write_text(json.dumps([asdict(metric) for metric in metrics.values()]))
    except OSError as error:
        log.warning("catalogue not written", error=str(error))
        written.unlink(missing_ok=True)


def read(folder: Path) -> dict[str, Metric]:
    """Return the table that was left in *folder*; where none could be, what is known without batches."""
    if not (folder / FILE).exists():
        return table(())
    return {one["name"]: _metric(**one) for one in json.loads((folder / FILE).read_text())}


def _metric(*, labels: list[str], children: list[list[str]] | None, buckets: list[float], **facts: Any) -> Metric:
    series = None if children is None else tuple(map(tuple, children))
    return Metric(labels=tuple(labels), children=series, buckets=tuple(buckets), **facts)
