"""One table says everything about metrics; it follows from what is declared."""

import re
from datetime import timedelta

import pytest
from metrics.catalogue.endpoint import SECONDS
from prometheus_client import generate_latest

from forgekeeper.batches import BATCHES, Record, Threshold, all_declared, child, queues
from forgekeeper.cli.metrics import PAGES, page
from forgekeeper.collectors import all_collectors
from forgekeeper.delivery import queues as delivery_queues
from forgekeeper.delivery.broker import broker
from forgekeeper.flags import FLAGS
from metrics.catalogue import stored, table
from metrics.catalogue.labels import Labels
from metrics.catalogue.metric import Counter, Gauge
from metrics.instruments import Instruments
from tests.harness.catalogue import LABELS, METRICS, of
from tests.harness.every import every
from tests.harness.toys import Outcome, declaring, toy

every_metric = every("metric", METRICS.values())


@pytest.fixture
def toys():
    """Declare a batch that has everything, and a child of it."""
    with declaring():
        declared = toy(
            document=7,
            queue="toys",
            team="parents",
            records=[
                Record("toy", examined=("deleted", "left"), processed=("deleted",), objective=timedelta(hours=1)),
                Record("broken_toy", errors={"database": ()}, refused=True),
                Record("new_toy", backlog=True),
            ],
            thresholds=[Threshold("duration", above=60)],
            counters=[Counter("toys_lost", "Toys that were not found.", ("left",))],
            collector="boxes",
            flag="tidy",
            flags={"tidy": "Put toys away at all."},
        )
        declared.collector("boxes", gauges=[Gauge("boxes", "Boxes for toys.", ("state",), (("full",), ("empty",)))])(
            lambda _settings: iter(())
        )
        sorting = child(
            declared,
            queue="box",
            budget=timedelta(minutes=1),
            time_limit=timedelta(minutes=2),
            outcome=Outcome,
            enqueued_as="left",
            lease=True,
            records=[],
        )

        def sort_toys(now, box):
            """Sort a box."""
            return []

        sorting(sort_toys)
        yield table(all_declared())


def test_every_batch_and_every_child_is_an_actor_with_its_queue():
    actors = {name: actor for name, actor in broker.actors.items() if {"document", "child"} & actor.options.keys()}

    assert {name: actor.queue_name for name, actor in actors.items()} == {one.name: one.queue for one in all_declared()}


def test_a_run_s_time_limit_is_no_shorter_than_its_budget():
    assert [one.name for one in all_declared() if one.time_limit < one.budget] == []


def test_queues_flags_and_collectors_are_the_real_ones(settings):
    assert LABELS.queues == queues()
    assert LABELS.flags == tuple((name,) for name in FLAGS)
    assert LABELS.collectors == tuple(all_collectors(settings))


@every_metric
def test_a_metric_is_named_as_prometheus_wants_it(metric):
    assert re.fullmatch(r"forgekeeper(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_seconds") == (metric.unit == "seconds")
    assert metric.help.endswith(".")


@every_metric
def test_no_label_is_one_that_prometheus_sets_or_that_knows_no_bounds(metric):
    assert not {"job", "instance", "type", "id", "project", "user", "message", "le"} & set(metric.labels)
    assert metric.children is None or {len(child) for child in metric.children} == {len(metric.labels)}


def test_the_documents_limits_are_edges_of_the_histograms():
    assert {30, 60, 250, 600} <= set(SECONDS)


def test_every_backlog_that_is_promised_is_looked_at_and_no_other():
    looked_at = {(one.name, record) for one in all_declared() for record in one.backlogs}
    refused = {(one.name, refused.record) for one in all_declared() for refused in one.refused}
    declared = {(one.name, record.name) for one in all_declared() for record in one.records if record.refused}

    assert looked_at == set(LABELS.backlogs)
    assert refused == declared


@pytest.mark.parametrize("process", ["worker", "scheduler"])
def test_what_counts_has_every_series_at_zero_but_instants_that_have_not_come(process):
    text = generate_latest(Instruments(process).know(METRICS).zero().registry).decode()

    for metric in of(process):
        suffix = "_count" if metric.type == "histogram" else ""
        found = re.findall(rf"^{metric.name}{suffix}(?:{{.*}})? 0\.0$", text, re.MULTILINE)
        assert metric.name.endswith("_timestamp_seconds") or len(found) == len(metric.children), metric.name


@pytest.mark.parametrize("process", ["worker", "scheduler"])
def test_promtool_has_nothing_against_what_counts(process, promtool):
    assert promtool(generate_latest(Instruments(process).know(METRICS).zero().registry).decode()) == ""


def test_every_process_has_a_page_in_the_documentation():
    assert set(PAGES) == {metric.process for metric in METRICS.values()}


def test_the_option_of_a_delayed_message_is_no_option_of_dramatiq_s():
    assert delivery_queues.DUE.startswith("forgekeeper_")


# What is declared anew


def test_before_anything_is_declared_the_engine_counts_all_the_same():
    counting = Instruments("worker")

    counting.inc("forgekeeper_log_messages_total", "info")

    assert counting.registry.get_sample_value("forgekeeper_log_messages_total", {"level": "info"}) == 1


def test_a_batch_that_is_declared_is_in_every_label_set_that_it_belongs_to(toys):
    def children(name):
        return {one for one in toys[f"forgekeeper_{name}"].children if "toys" in one or "sort_toys" in one}

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


def test_what_a_batch_brings_has_zero_series_collectors_and_documentation(toys):
    text = generate_latest(Instruments("worker").know(toys).zero().registry).decode()

    assert 'forgekeeper_toys_lost_total{batch="toys"} 0.0' in text
    assert toys["forgekeeper_boxes"].children == (("full",), ("empty",))
    assert ("boxes",) in toys["forgekeeper_exporter_collector_success"].children
    assert ("tidy",) in toys["forgekeeper_feature_flag_enabled"].children
    assert "| `forgekeeper_toys_lost_total` | counter | `batch` |  | Toys that were not found. |" in page(toys)


def test_a_counter_that_two_batches_bring_is_one_metric_of_both():
    with declaring():
        toy(counters=[Counter("missing_repositories", "The same.", ("left",))])

        known = table(all_declared())

    assert known["forgekeeper_missing_repositories_total"].children == (("git_ref_cleanup",), ("toys",))


def test_the_order_is_that_of_declaration_parents_first():
    assert Labels(all_declared()).names[: len(BATCHES)] == tuple(BATCHES)


def test_the_catalogue_is_read_from_its_file_as_it_was_written(tmp_path):
    stored.write(tmp_path, METRICS)

    assert stored.read(tmp_path) == METRICS


def test_where_no_catalogue_could_be_written_the_engine_s_is_known(tmp_path):
    stored.write(tmp_path / "away", METRICS)

    assert stored.read(tmp_path / "away") == table(())
