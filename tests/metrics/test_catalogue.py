"""One table says everything about metrics, and agrees with what it names."""

import re

import pytest
from prometheus_client import generate_latest

from forgekeeper.batches import BATCHES
from forgekeeper.batches import queues as declared_queues
from forgekeeper.cli.metrics import PAGES
from forgekeeper.delivery import queues
from forgekeeper.flags import FLAGS
from forgekeeper.process.broker import broker
from metrics.catalogue import BATCHES as KNOWN
from metrics.catalogue import COLLECTORS, FLAGS, METRICS, OBJECTIVES, QUEUES, SECONDS, of
from metrics.exporter import COLLECT
from metrics.instruments import Instruments
from tests.harness.every import every

every_metric = every("metric", METRICS.values())


def test_every_batch_and_every_child_is_known_with_its_queue_and_its_parent():
    actors = {name: actor for name, actor in broker.actors.items() if {"document", "child"} & actor.options.keys()}

    assert {name: actor.queue_name for name, actor in actors.items()} == {name: b.queue for name, b in KNOWN.items()}
    assert {name for name, batch in KNOWN.items() if batch.parent is None} == set(BATCHES)
    assert {batch.parent for batch in KNOWN.values()} - {None} <= set(BATCHES)


def test_the_document_of_every_batch_is_the_actor_s():
    documents = {name: str(batch.document or "none") for name, batch in BATCHES.items()}

    assert documents == {name: KNOWN[name].document for name in BATCHES}


def test_a_run_s_time_limit_is_no_shorter_than_its_budget():
    assert [name for name, batch in BATCHES.items() if KNOWN[name].time_limit < batch.budget] == []


def test_queues_flags_and_collectors_are_the_real_ones():
    assert QUEUES == declared_queues()
    assert set(FLAGS) == set(FLAGS)
    assert set(COLLECTORS) == {*COLLECT, "roots"}


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


def test_every_objective_is_of_a_backlog():
    assert set(OBJECTIVES) <= set(METRICS["forgekeeper_backlog_records"].children)


@pytest.mark.parametrize("process", ["worker", "scheduler"])
def test_what_counts_has_every_series_at_zero_but_instants_that_have_not_come(process):
    text = generate_latest(Instruments(process).zero().registry).decode()

    for metric in of(process):
        suffix = "_count" if metric.type == "histogram" else ""
        found = re.findall(rf"^{metric.name}{suffix}(?:{{.*}})? 0\.0$", text, re.MULTILINE)
        assert metric.name.endswith("_timestamp_seconds") or len(found) == len(metric.children), metric.name


@pytest.mark.parametrize("process", ["worker", "scheduler"])
def test_promtool_has_nothing_against_what_counts(process, promtool):
    assert promtool(generate_latest(Instruments(process).zero().registry).decode()) == ""


def test_every_process_has_a_page_in_the_documentation():
    assert set(PAGES) == {metric.process for metric in METRICS.values()}


def test_the_option_of_a_delayed_message_is_no_option_of_dramatiq_s():
    assert queues.DUE.startswith("forgekeeper_")
