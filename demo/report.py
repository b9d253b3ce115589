"""What the demo counts, shows and checks: the sample data before and after, the runs, and the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from demo.figures import Compared, Figure, Sample
from demo.sample_data import SAMPLE_DATA
from forgekeeper.batches import BATCHES, all_declared
from forgekeeper.cli.console import Problem, facts, out, table
from forgekeeper.cli.story import tell
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import NAME
from metrics.catalogue import series

PAGES = ("worker", "scheduler", "exporter")


class Count(NamedTuple):
    """How many there are, and how many of them are to go."""

    total: int
    due: int


Counts = dict[str, Count]
Samples = dict[str, Sample]
"""What there is of each batch that has sample data, by its name."""


def count_samples(settings: Settings) -> Samples:
    """Count what there is of the sample data."""
    return {name: data.count(settings) for name, data in SAMPLE_DATA.items()}


def counts(folder: Path, samples: Samples) -> Counts:
    """Say what there is, by the words for it; objects too."""
    objects = sum(path.is_file() and path.name != NAME for path in (folder / "objects").rglob("*"))
    due = sum(sample.objects for sample in samples.values()) + DeletedObject.due(now()).count()
    found = {sample.what: Count(sample.total, sample.due) for sample in samples.values()}
    return found | {"objects": Count(objects, due)}


def figures(samples: Samples) -> Iterator[Figure]:
    """Yield what the metrics must show of the sample data, and that nothing failed."""
    for batch, sample in samples.items():
        yield from SAMPLE_DATA[batch].figures(sample, [run.result for run in _succeeded(JobRun.of(batch))])
    for failed in ("run_failures_total", "run_retries_total", "run_dead_letters_total"):
        yield Figure("worker", failed, {}, 0)
    yield Figure("exporter", "exporter_collector_success", {}, len(series(all_declared())["collectors"] or ()))


def show(before: Counts, after: Counts, compared: Compared) -> None:
    """Print what was there and is left, what the batches and the metrics say, and the story of a tick."""
    out.print("4. This is what they did:\n")
    rows = ((what, *(f"{n:,}" for n in (*before[what], *after[what]))) for what in before)
    table("", ("what", "there were", "to go", "are left", "to go"), rows)
    out.print()
    runs = {batch: _succeeded(JobRun.of(batch)) for batch in BATCHES}
    results = ((batch, len(of_batch), facts(_busiest(of_batch).result)) for batch, of_batch in runs.items())
    table("", ("batch", "runs", "the busiest one's result"), results)
    ports = ", ".join(f":{Settings.model_fields[f'metrics_port_{page}'].default} ({page})" for page in PAGES)
    out.print(f"\n5. Their pages of metrics say the same; elsewhere they are at {ports}:\n")
    table("", ("page", "metric", "of", "it says", "was done"), _metrics(compared))
    first = next(iter(BATCHES))
    out.print(f"\n6. The story of a tick, as `forgekeeper why {first}` tells it:\n")
    for sentence in tell(_busiest(runs[first])):
        out.print(f"   {sentence}")


def check(samples: Samples, before: Counts, after: Counts, compared: Compared) -> None:
    """Raise `Problem` unless what was due, and nothing else, has gone, and the metrics say so."""
    staying = {sample.what for sample in samples.values() if sample.stay}
    expected = {what: Count(count.total - (0 if what in staying else count.due), 0) for what, count in before.items()}
    if after != expected:
        raise Problem(f"a figure is wrong: expected {expected}, found {after}")
    wrong = [
        f"{figure.metric}({figure.labels}) of the {figure.page} is {shown}, not {figure.done}"
        for figure, shown in compared
        if shown != figure.done
    ]
    if wrong:
        raise Problem("a page of metrics is wrong: " + "; ".join(wrong))


def _metrics(compared: Compared) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric and kind of record; figures of several batches are added up."""
    sums: dict[tuple[str, str, str], tuple[float, float]] = {}
    for figure, shown in compared:
        of = figure.page, figure.metric, figure.labels.get("record", "all")
        known, done = sums.get(of, (0, 0))
        sums[of] = known + (shown or 0), done + figure.done
    for (page, metric, record), figures in sums.items():
        yield page, f"forgekeeper_{metric}", record, *(f"{figure:,.0f}" for figure in figures)


def _succeeded(runs: Iterable[JobRun]) -> list[JobRun]:
    return [run for run in runs if run.state == "succeeded"]


def _busiest(runs: list[JobRun]) -> JobRun:
    """Return the run that did most, by the sum of its figures."""
    return max(runs, key=lambda run: sum(value for value in run.result.values() if isinstance(value, int)))
