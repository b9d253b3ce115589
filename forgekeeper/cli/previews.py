"""What `run --dry-run` shows: what a run would do, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from forgekeeper.batches import BatchSpec
from forgekeeper.cli.console import moment, progress
from forgekeeper.declaring.preview import Part
from forgekeeper.runs.previewing import Preview, preview
from forgekeeper.settings import Settings


def of(batch: BatchSpec, settings: Settings, *, sample: int) -> Preview:
    """Preview the batch; a terminal shows how far that has got."""
    try:
        told = lambda part: progress(f"{batch.name}: {part.records:,} counted, {part.record}")  # noqa: E731
        return preview(batch, settings, sample=sample, told=told)
    finally:
        progress("")


def lines(found: Preview) -> Iterator[str]:
    """Say a preview in lines."""
    yield f"{found.batch}, if it ran at {moment(found.now)} UTC; nothing has been changed:"
    yield from (f"  note: {note}" for note in found.notes)
    for part in found.parts:
        yield f"  {_headline(part)}"
        yield from (f"    {line}" for line in _details(part))
    if found.due is not None:
        yield f"  due in all: {found.due:,}"


def _headline(part: Part) -> str:
    about = "about " if part.estimate else ""
    said = f"{part.record} of {part.batch}: {about}{part.records:,} would be {part.verb}"
    return said + (f", {about}{decimal(part.bytes)}" if part.bytes is not None else "")


def _details(part: Part) -> Iterator[str]:
    if part.estimate:
        yield "an estimate: the time was up before all were counted"
    if part.oldest is not None:
        yield f"due since {moment(part.oldest)}" + (f", the newest since {moment(part.newest)}" if part.newest else "")
    shown = part.as_json()
    if shown["projects"]:
        others = shown["other_projects"]
        rest = f", {others['projects']:,} others {others['records']:,}" if others["projects"] else ""
        yield "by project: " + ", ".join(f"{name} {count:,}" for name, count in shown["projects"].items()) + rest
    for reason, count in part.kept.items():
        number = "not counted in time" if count is None else f"{count:,} stay"
        yield f"{reason}: {number}"
    if part.sample:
        yield "such as " + ", ".join(f"{key} ({name})" if name else key for key, name in part.sample)
