"""One table says everything about metrics; it follows from what is declared, and so does what is shown."""

import re
from datetime import timedelta

import pytest

from forgekeeper import child
from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import FLAGS, Threshold, all_declared, list_queues
from forgekeeper.api.inspection import RefusedRecords
from forgekeeper.api.records import Record
from forgekeeper.cli.status import gather_facts
from forgekeeper.exporter import all_collectors
from forgekeeper.platform.database import now
from metrics.catalogue import Counter, Gauge, Reading, build_metrics
from tests.harness.catalogue import METRICS, SERIES
from tests.harness.every import every
from tests.harness.toys import ToyResult, declare_toy_batch, forget_declarations

SINCE = timedelta(minutes=7)
REFUSED = RefusedRecords(
    kind="toy",
    record="broken_toy",
    count=lambda: 2,
    entries=lambda _settings, _limit: [],
    retry=lambda _keys: 0,
    discard=lambda _keys: 0,
)
BOXES = Gauge("boxes", "Boxes for toys.", ("state",), (("full",), ("empty",)))

every_metric = every("metric", METRICS.values())


def test_queues_flags_and_collectors_are_the_real_ones(settings):
    for name, real in (("queues", list_queues()), ("flags", FLAGS), ("collectors", all_collectors(settings))):
        assert SERIES[name] == tuple((one,) for one in real)


@every_metric
def test_a_metric_and_its_labels_are_named_as_prometheus_wants_them(metric):
    assert re.fullmatch(r"forgekeeper(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_seconds") == (metric.unit == "seconds")
    assert metric.help.endswith(".")
    # Prometheus sets some labels itself; the values of others know no bounds.
    assert not {"job", "instance", "type", "id", "project", "user", "message", "le"} & set(metric.labels)
    assert metric.children is None or {len(child) for child in metric.children} == {len(metric.labels)}


def test_every_backlog_that_is_promised_is_looked_at_and_no_other():
    looked_at = {(one.name, record) for one in all_declared() for record in one.backlogs}

    assert looked_at == set(SERIES["backlogs"])


def test_a_batch_that_is_declared_is_in_every_label_set_that_it_belongs_to_with_what_it_brings():
    with forget_declarations():
        declared = declare_toy_batch(
            document=7,
            queue="toys",
            team="parents",
            records=[
                Record("toy", examined=("deleted", "left"), processed=("deleted",), objective=timedelta(hours=1)),
                Record("broken_toy", errors={"database": ()}),
                Record("new_toy", backlog=True),
            ],
            thresholds=[Threshold("duration", above=60)],
            counters=[Counter("toys_lost", "Toys that were not found.", ("left",))],
            flag="tidy",
            flags={"tidy": "Put toys away at all."},
        )
        declared.add_collector("boxes", gauges=[BOXES])(lambda _settings: iter(()))
        limits = {"budget": timedelta(minutes=1), "time_limit": timedelta(minutes=2)}
        child(declared, queue="box", outcome=ToyResult, enqueued_as="left", lease=True, records=[], **limits)(sort_toys)
        known = build_metrics(all_declared())

    def children(name):
        return {one for one in known[f"forgekeeper_{name}"].children if "toys" in one or "sort_toys" in one}

    assert children("runs_total") == {("toys",), ("sort_toys",)}
    assert children("scheduler_enqueued_total") == {("toys",)}
    assert children("info") == {("toys", "7", "toys", "parents"), ("sort_toys", "7", "box", "parents")}
    assert children("records_examined_total") == {("toys", "toy")}
    assert children("records_processed_total") == {("toys", "toy")}
    assert children("record_errors_total") == {("toys", "broken_toy", "database")}
    assert children("quarantine_records") == {("toys", "broken_toy"), ("toys", "sort_toys")}
    assert children("backlog_records") == {("toys", "toy"), ("toys", "new_toy")}
    assert children("backlog_age_objective_seconds") == {("toys", "toy")}
    assert children("threshold_breaches_total") == {("toys", "duration")}
    assert children("children_enqueued_total") == {("toys", "sort_toys")}
    assert children("lease_held") == {("sort_toys",)}
    assert children("dead_letter_messages") >= {("toys", "toys"), ("box", "sort_toys"), ("toys", "unknown")}
    assert known["forgekeeper_boxes"].children == (("full",), ("empty",))
    assert ("boxes",) in known["forgekeeper_exporter_collector_success"].children
    assert ("tidy",) in known["forgekeeper_feature_flag_enabled"].children
    assert known["forgekeeper_toys_lost_total"].children == (("toys",),)


def sort_toys(now, box):
    """Sort a box."""
    return []


def test_a_counter_that_two_batches_bring_is_one_metric_of_both():
    with forget_declarations():
        declare_toy_batch(counters=[Counter("missing_repositories", "The same.", ("left",))])

        known = build_metrics(all_declared())

    assert known["forgekeeper_missing_repositories_total"].children == (("git_ref_cleanup",), ("toys",))


@pytest.fixture
def shelf():
    """Let three toys be due, and two be broken."""
    with forget_declarations():
        toys = declare_toy_batch(
            records=[Record("toy", objective=timedelta(hours=1)), Record("broken_toy", refused=True)]
        )
        toys.add_backlog("toy")(lambda instant: Backlog(3, instant - SINCE))
        toys.add_quarantine(REFUSED)
        yield toys


def test_the_exporter_reads_the_backlogs_that_a_batch_declares(shelf, look):
    page = look()

    since = page.value("backlog_oldest_timestamp_seconds", batch="toys", record="toy")
    assert page.value("exporter_collector_success", collector="toys") == 1
    assert page.value("backlog_records", batch="toys", record="toy") == 3
    assert since == pytest.approx((now() - SINCE).timestamp(), abs=20)
    assert page.value("quarantine_records", batch="toys", record="broken_toy") == 2
    assert page.value("schedule_interval_seconds", batch="toys") == 60


def test_the_exporter_asks_what_a_batch_brings_and_one_that_fails_takes_no_other_away(shelf, look):
    shelf.add_collector("shelf", gauges=[BOXES], database=False)(
        lambda _settings: iter([Reading("boxes", 4, ("full",))])
    )

    @shelf.add_collector("cellar", gauges=[BOXES])
    def fail(_settings):
        yield Reading("boxes", 4, ("empty",))
        raise KeyError("no cellar")

    page = look()

    assert page.series("boxes") == {("full",): 4}
    assert page.value("exporter_collector_success", collector="shelf") == 1
    assert page.value("exporter_collector_success", collector="cellar") == 0
    assert page.value("backlog_records", batch="toys", record="toy") == 3


def test_status_has_the_batch_and_the_part_that_it_brings(shelf, database, settings):
    shelf.add_status_part("shelves", lambda: 5, lambda found: f"Shelves: {found}.")

    found = gather_facts(settings.model_copy(update={"cron_toys": None}))

    assert found["batches"]["toys"]["backlog"] == 3
    assert found["shelves"] == 5
