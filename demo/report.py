"""What the demo counts, shows and checks: the sample data before and after, the runs, and the metrics."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from demo.sample_data import MALFORMED, REFUSED, Sample, count_samples
from forgekeeper.batches import BATCHES, all_declared
from forgekeeper.cli.console import Problem, facts, out, table
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import NAME
from metrics.catalogue import series

PAGES = ("worker", "scheduler", "exporter")
Counts = dict[str, Sample]
"""What there is of each batch that has sample data, by its name."""
Pages = Mapping[str, list[Series]]
"""What each process's metrics endpoint shows, by the name of its command."""


class Figure(NamedTuple):
    """What a process must show: the series of *metric* with these labels add up to *done*."""

    page: str
    metric: str
    labels: Mapping[str, str]
    done: float

    def shown(self, pages: Pages) -> float | None:
        """Return what is shown, None when there is no such series."""
        values = [
            one.value
            for one in pages[self.page]
            if one.name == f"forgekeeper_{self.metric}" and self.labels.items() <= one.labels.items()
        ]
        return sum(values) if values else None


def figures(before: Mapping[str, Sample]) -> Iterator[Figure]:
    """Yield what the metrics must show of the sample data that was there *before*, and that nothing failed."""
    due = {batch: sample.due for batch, sample in before.items()}
    processed = (
        ("user_status_cleanup", "user_status", due["user_status_cleanup"]),
        ("clean_project_refs", "git_ref_deletion", due["git_ref_cleanup"]),
        ("delete_artifact_bucket", "expired_artifact", due["expired_job_artifacts"]),
        # Also the object that never arrived.
        ("delete_objects", "deleted_object", due["expired_job_artifacts"]),
        ("stale_direct_uploads", "stale_upload", due["stale_direct_uploads"] - len(MALFORMED)),
        ("stale_imports", "bulk_import", due["stale_imports"]),
        ("stale_imports", "entity", 2 * due["stale_imports"]),
        # Of an entity's four trackers three are unfinished.
        ("stale_imports", "tracker", 6 * due["stale_imports"]),
    )
    for batch, record, count in processed:
        yield Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)
    refs = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield Figure("worker", "record_errors_total", refs, len(REFUSED))
    yield Figure("exporter", "backlog_records", refs, 0)
    yield Figure("exporter", "quarantine_records", {"record": "rejected_ref"}, len(REFUSED))
    yield Figure("exporter", "quarantine_records", {"record": "failed_upload"}, len(MALFORMED))
    for failed in ("run_failures_total", "run_retries_total", "run_dead_letters_total"):
        yield Figure("worker", failed, {}, 0)
    yield Figure("exporter", "exporter_collector_success", {}, len(series(all_declared())["collectors"] or ()))


Compared = list[tuple[Figure, float | None]]
"""Figures, and what is shown for each."""


def scrape(urls: Mapping[str, str]) -> Pages:
    """Read these endpoints; one that does not answer shows nothing."""
    return {name: _read(url) for name, url in urls.items()}


def compare(urls: Mapping[str, str], expected: Sequence[Figure], *, timeout: float) -> Compared:
    """Compare what is shown with what is expected, until they agree or *timeout* seconds have passed."""
    ends = time.monotonic() + timeout
    while True:
        pages = scrape(urls)
        compared = [(figure, figure.shown(pages)) for figure in expected]
        if all(shown == figure.done for figure, shown in compared) or time.monotonic() > ends:
            return compared
        time.sleep(0.1)


def _read(url: str) -> list[Series]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310, an endpoint of our own
            text = answer.read().decode()
    except (OSError, HTTPException):
        return []
    return [series for family in text_string_to_metric_families(text) for series in family.samples]


def count_all(settings: Settings, folder: Path) -> Counts:
    """Count what there is of the sample data, and the objects below *folder*."""
    samples = count_samples(settings)
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
