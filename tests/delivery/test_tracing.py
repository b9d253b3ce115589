"""Spans of runs, children and chunks: sent by real processes to a real receiver in the place of a collector."""

import gzip
import logging
import subprocess
import sys
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from forgekeeper.engine.tracing import Tracing, derive_run_ids
from forgekeeper.platform.settings import SettingsError
from tests.harness.installation import INSTALLATION
from tests.harness.many_rows import statuses as due_statuses
from tests.harness.programs import ROOT, Program, eventually
from tests.harness.receivers import answer_never, answer_with, run_receiver
from tests.harness.settings import settings_with
from tests.harness.waiting import scale_timeout
from workers.git_ref_cleanup import clean_project_refs
from workers.user_status_cleanup import user_status_cleanup

NAME = user_status_cleanup.name
ERROR = 2
"""OpenTelemetry's number of the status."""


@pytest.fixture
def collector(monkeypatch):
    with run_receiver() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield server


@pytest.fixture
def tracing(database, collector):
    return Tracing.from_settings(settings_with(tracing="otlp"))


def read_requests(collector):
    for request in collector.requests:
        body = gzip.decompress(request.body) if request.headers.get("content-encoding") == "gzip" else request.body
        yield ExportTraceServiceRequest.FromString(body)


def read_spans(collector):
    """Return all spans that the collector has got."""
    resources = [one for request in read_requests(collector) for one in request.resource_spans]
    return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


def facts(span):
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_a_run_and_its_chunks_are_spans_of_one_trace(database, collector, settings, tmp_path):
    due_statuses(2_500)
    program = Program(tmp_path / "log", "-m", "forgekeeper.cli", "run", NAME, tracing="otlp")

    assert program.process.wait(scale_timeout(60)) == 0
    spans = read_spans(collector)
    (run,) = [one for one in spans if one.name == f"run {NAME}"]
    chunks = [one for one in spans if one.name == "chunk"]
    number = facts(run)["forgekeeper.run"]
    ids = derive_run_ids(INSTALLATION, number)
    assert (
        facts(run).items()
        >= {
            "forgekeeper.batch": NAME,
            "forgekeeper.deleted": 2_500,
            "forgekeeper.attempt": 1,
        }.items()
    )
    assert (int.from_bytes(run.trace_id), int.from_bytes(run.span_id)) == ids
    assert len(chunks) > 1
    assert sum(facts(one)["forgekeeper.deleted"] for one in chunks) == 2_500
    assert {(one.trace_id, one.parent_span_id) for one in chunks} == {(run.trace_id, run.span_id)}


def test_a_child_in_another_process_is_in_the_trace_of_its_run(sent, start_worker, collector):
    worker = start_worker(tracing="otlp").ready()
    sent.push("note", "k", key="k", run=7)

    eventually(lambda: read_spans(collector))
    (child,) = read_spans(collector)
    ids = derive_run_ids(INSTALLATION, 7)
    assert (int.from_bytes(child.trace_id), int.from_bytes(child.parent_span_id)) == ids
    assert (child.name, facts(child)["forgekeeper.child.key"], facts(child)["forgekeeper.batch"]) == (
        "child note",
        "k",
        "odd",
    )
    assert worker.end() == 0


def test_a_worker_that_ends_sends_its_last_spans(sent, start_worker, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    worker = start_worker(tracing="otlp").ready()
    sent.push("note", "k", key="k", run=7)
    eventually(lambda: sent.done() and not sent.left())

    assert worker.end() == 0
    assert [one.name for one in read_spans(collector)] == ["child note"]


def test_an_error_has_its_type_and_not_its_message(tracing, collector):
    span = tracing.start_attempt(user_status_cleanup, run=7, attempt=1, key="7")
    span.end(0, None, ValueError("hunter2"))
    tracing.close()

    (found,) = read_spans(collector)
    assert (found.status.code, facts(found)["error.type"]) == (ERROR, "ValueError")
    assert "hunter2" not in str(found)


def test_a_later_attempt_is_a_span_below_the_first(tracing, collector):
    for attempt in (1, 2):
        tracing.start_attempt(user_status_cleanup, run=7, attempt=attempt, key="7").end(0, "deadline", None)
    tracing.close()

    first, second = sorted(read_spans(collector), key=lambda span: facts(span)["forgekeeper.attempt"])
    assert (second.trace_id, second.parent_span_id) == (first.trace_id, first.span_id)
    assert first.span_id != second.span_id
    assert facts(first)["forgekeeper.stopped"] == "deadline"


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_sampler_takes_a_run_with_all_its_children_or_leaves_all_out(database, collector, monkeypatch, ratio):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(ratio))
    tracing = Tracing.from_settings(settings_with(tracing="otlp"))
    for run in range(1, 41):
        tracing.start_attempt(user_status_cleanup, run=run, attempt=1, key=str(run)).end(0, None, None)
        tracing.start_attempt(clean_project_refs, run=run, attempt=None, key="k").end(0, None, None)
    tracing.close()

    spans = read_spans(collector)
    runs = {facts(one)["forgekeeper.run"] for one in spans if one.name.startswith("run")}
    children = {facts(one)["forgekeeper.run"] for one in spans if one.name.startswith("child")}
    assert runs == children
    assert {0.0: len(runs) == 0, 0.5: 5 < len(runs) < 35, 1.0: len(runs) == 40}[ratio]


def test_the_environment_names_the_service(database, collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cleaner")
    tracing = Tracing.from_settings(settings_with(tracing="otlp"))
    tracing.start_attempt(user_status_cleanup, run=7, attempt=1, key="7").end(0, None, None)
    tracing.close()

    (request,) = read_requests(collector)
    assert {facts(one.resource)["service.name"] for one in request.resource_spans} == {"cleaner"}


@pytest.mark.parametrize("answer", [answer_never, answer_with(503)])
def test_a_collector_that_is_ill_delays_no_span_and_the_end_by_a_second(tracing, collector, answer):
    collector.answer = answer
    # The exporter retries after this test, and its complaints would be in the output of later tests.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    began = time.monotonic()
    for run in range(3_000):
        tracing.start_attempt(clean_project_refs, run=run, attempt=None, key="k").end(0, None, None)
    took = time.monotonic() - began
    began = time.monotonic()
    tracing.close()

    assert took / 3_000 < scale_timeout(0.005)
    assert time.monotonic() - began < scale_timeout(1.5)


def test_with_tracing_off_nothing_that_makes_or_sends_spans_is_imported():
    # redis-py imports the SDK's metrics whenever they are installed.
    code = (
        "import sys; from forgekeeper.delivery.boot import load_settings; from forgekeeper.engine.attempt import Runner;"
        "from forgekeeper.engine.tracing import Tracing; assert Tracing.from_settings(load_settings()) is None;"
        "sys.exit(any(name.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter')) for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_the_extra_the_start_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(
        SettingsError, match=r"TRACING needs the extra `otel`, for opentelemetry.sdk.trace: pip install"
    ):
        Tracing.from_settings(settings_with(tracing="otlp"))


def test_ids_of_runs_differ_by_run_and_by_installation():
    ids = {derive_run_ids(one, run) for one in (INSTALLATION, "other") for run in range(1, 1_000)}

    assert len({one.trace for one in ids}) == len({one.span for one in ids}) == len(ids) == 2 * 999
    assert all(one.trace and one.span for one in ids)
