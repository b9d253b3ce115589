"""What the demo counts, shows and checks: the sample data before and after, the runs, and the metrics."""

from __future__ import annotations

from pathlib import Path

from demo.figures import Compared
from demo.sample_data import SAMPLE_DATA, Sample
from forgekeeper.batches import BATCHES
from forgekeeper.cli.console import Problem, facts, out, table
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import NAME

PAGES = ("worker", "scheduler", "exporter")
Counts = dict[str, Sample]
"""What there is of each batch that has sample data, by its name."""


def count_all(settings: Settings, folder: Path) -> Counts:
    """Count what there is of the sample data, and the objects below *folder*."""
    samples = {name: count(settings) for name, (_, count) in SAMPLE_DATA.items()}
    objects = sum(path.is_file() and path.name != NAME for path in (folder / "objects").rglob("*"))
    due = sum(sample.objects for sample in samples.values()) + DeletedObject.due(now()).count()
    return samples | {"delete_objects": Sample("objects", objects, due)}


def show(before: Counts, after: Counts, compared: Compared) -> None:
    """Print what was there and is left, and what the batches and the metrics say."""
    out.print("4. This is what they did:\n")
    pairs = ((was, after[name]) for name, was in before.items())
    rows = ((was.what, *(f"{n:,}" for n in (was.total, was.due, left.total, left.due))) for was, left in pairs)
    table("", ("what", "there were", "to go", "are left", "to go"), rows)
    out.print()
    runs = {batch: [run for run in JobRun.of(batch) if run.state == "succeeded"] for batch in BATCHES}
    results = ((batch, len(of_batch), facts(max(of_batch, key=_amount).result)) for batch, of_batch in runs.items())
    table("", ("batch", "runs", "the busiest one's result"), results)
    ports = ", ".join(f":{Settings.model_fields[f'metrics_port_{page}'].default} ({page})" for page in PAGES)
    out.print(f"\n5. Their pages of metrics say the same; elsewhere they are at {ports}:\n")
    said = (
        (of.page, f"forgekeeper_{of.metric}", of.labels.get("record", "all"), f"{shown or 0:,.0f}", f"{of.done:,.0f}")
        for of, shown in compared
    )
    table("", ("page", "metric", "of", "it says", "was done"), said)


def check(before: Counts, after: Counts, compared: Compared) -> None:
    """Raise `Problem` unless what was due, and nothing else, has gone, and the metrics say so."""
    expected = {one.what: (one.total - (0 if one.stay else one.due), 0) for one in before.values()}
    found = {one.what: (one.total, one.due) for one in after.values()}
    if found != expected:
        raise Problem(f"a figure is wrong: expected {expected}, found {found}")
    wrong = [
        f"{figure.metric}({figure.labels}) of the {figure.page} is {shown}, not {figure.done}"
        for figure, shown in compared
        if shown != figure.done
    ]
    if wrong:
        raise Problem("a page of metrics is wrong: " + "; ".join(wrong))


def _amount(run: JobRun) -> int:
    """Say how much a run did: the sum of its figures."""
    return sum(value for value in run.result.values() if isinstance(value, int))
