"""Errors reported to a real receiver in the place of Sentry: which, with which facts, and what never leaves."""

import gzip
import subprocess
import sys
import time
from functools import partial

import peewee as pw
import pytest
import structlog

from forgekeeper.delivery import error_reports
from forgekeeper.delivery.error_reports import ErrorReporter
from forgekeeper.platform.settings import SettingsError
from metrics import logs
from tests.harness.error_events import make_dsn, read_events
from tests.harness.ports import free_ports
from tests.harness.programs import ROOT, eventually
from tests.harness.receivers import answer_never, answer_with, run_receiver
from tests.harness.settings import settings_with
from tests.harness.waiting import scale_timeout

from .conftest import PROGRAM

VALUE = "hunter2"


@pytest.fixture
def receiver():
    with run_receiver() as server:
        yield server


@pytest.fixture
def reporting(receiver, tmp_path):
    """A logger whose errors are reported, and its reporter."""
    config, was_configured = structlog.get_config(), structlog.is_configured()
    reporter = ErrorReporter(make_dsn(receiver))
    with (tmp_path / "log").open("w") as stream:
        logs.configure("json", "INFO", stream, on_error=reporter.report_line)
        yield structlog.get_logger("test"), reporter
    structlog.configure(**config) if was_configured else structlog.reset_defaults()
    logs.configure()


def fail():
    password = VALUE
    try:
        {}[password]
    except KeyError as error:
        raise ValueError(f"bad name {VALUE} at postgresql://u:{VALUE}@h/d") from error


def caught(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001, any error
        return error
    raise AssertionError


def test_an_error_of_a_run_is_reported_with_its_tags_and_its_stack(receiver, reporting):
    log, reporter = reporting
    with structlog.contextvars.bound_contextvars(batch="delete_objects", run=7, attempt=2, message_id="7"):
        log.error("run failed", exc_info=caught(fail))
    reporter.close()

    (event,) = read_events(receiver)
    assert (event["level"], event["message"]) == ("error", "run failed")
    assert event["tags"] == {"batch": "delete_objects", "queue": "objects", "run": "7", "attempt": "2"}
    *_, last = event["exception"]["values"]
    assert last["type"] == "ValueError"
    assert last["stacktrace"]["frames"][-1]["function"] == "fail"


def test_an_error_of_a_child_has_the_child_and_its_batch(receiver, reporting):
    log, reporter = reporting
    with structlog.contextvars.bound_contextvars(batch="clean_project_refs", run=7):
        log.error("child failed", exc_info=caught(fail))
    reporter.close()

    (event,) = read_events(receiver)
    expected = {"batch": "git_ref_cleanup", "child": "clean_project_refs", "queue": "git", "run": "7"}
    assert event["tags"] == expected


def test_a_report_has_no_message_no_variable_and_no_source(receiver, reporting):
    log, reporter = reporting
    log.error("run failed", exc_info=caught(fail), result=VALUE, key=VALUE)
    reporter.close()

    (request,) = receiver.requests
    body = gzip.decompress(request.body)
    assert b"run failed" in body
    assert VALUE.encode() not in body
    frames = [
        frame for value in read_events(receiver)[0]["exception"]["values"] for frame in value["stacktrace"]["frames"]
    ]
    assert not {"vars", "context_line", "abs_path"}.intersection(*frames)
    assert str(sys.prefix) not in body.decode()


def test_an_error_of_postgresql_has_its_sqlstate_and_not_its_values(database, receiver, reporting):
    log, reporter = reporting
    log.error("run failed", exc_info=caught(partial(database.execute_sql, "select 'hunter2'::int")))
    reporter.close()

    (event,) = read_events(receiver)
    assert event["exception"]["values"][-1]["value"] == "SQLSTATE 22P02"
    assert VALUE not in str(event)
    assert issubclass(pw.DataError, pw.PeeweeException)


def test_a_critical_line_has_arrived_when_it_is_logged(receiver, reporting):
    log, _reporter = reporting
    log.critical("process ends itself", reason="a thread has died")

    (event,) = read_events(receiver)
    assert (event["level"], event["message"], event["tags"]) == (
        "fatal",
        "process ends itself",
        {"reason": "a thread has died"},
    )


@pytest.mark.parametrize("method", ["warning", "error"])
def test_a_line_without_an_exception_is_no_report(receiver, reporting, method):
    log, reporter = reporting
    getattr(log, method)("run held", run=1)
    reporter.close()

    assert receiver.requests == []


@pytest.mark.parametrize("answer", [answer_never, answer_with(500), answer_with(429)])
def test_a_server_that_is_ill_delays_no_line_and_the_end_by_less_than_a_second(receiver, reporting, answer):
    log, reporter = reporting
    receiver.answer = answer
    error = caught(fail)
    log.error("warm up", exc_info=error)
    began = time.monotonic()
    for _ in range(error_reports.MAX_QUEUED_REPORTS * 2):
        log.error("run failed", exc_info=error)
    took = time.monotonic() - began

    began = time.monotonic()
    log.critical("process ends itself")
    reporter.close()

    assert took / (error_reports.MAX_QUEUED_REPORTS * 2) < scale_timeout(0.05)
    assert time.monotonic() - began < scale_timeout(1.2)


def test_a_server_that_is_away_raises_nothing(tmp_path):
    reporter = ErrorReporter(f"http://key@127.0.0.1:{free_ports(1)[0]}/1")

    reporter.report_line({"level": "critical", "event": "x", "exc_info": caught(fail)})
    reporter.close()


def test_without_the_setting_the_sdk_is_not_imported():
    code = (
        "import sys; from forgekeeper.delivery.error_reports import ErrorReporter;"
        "from forgekeeper.delivery.boot import load_settings;"
        "assert ErrorReporter.from_settings(load_settings()) is None;"
        "sys.exit('sentry_sdk' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_the_extra_the_start_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentry_sdk.client", None)

    with pytest.raises(SettingsError, match=r"SENTRY_DSN needs the extra `sentry`, for sentry_sdk.client: pip install"):
        ErrorReporter.from_settings(settings_with(sentry_dsn="https://key@h/1"))


def test_a_child_that_fails_in_a_worker_is_reported(sent, start_worker, receiver, tmp_path):
    assert PROGRAM.exists()
    (tmp_path / VALUE).touch()
    worker = start_worker(sentry_dsn=make_dsn(receiver)).ready()
    sent.push("fail_once_there", str(tmp_path / VALUE), run=7)

    eventually(lambda: receiver.requests)
    (event,) = read_events(receiver)
    assert event["tags"] == {"batch": "odd", "child": "fail_once_there", "queue": "objects", "run": "7"}
    assert VALUE not in str(event)
    assert worker.end() == 0
