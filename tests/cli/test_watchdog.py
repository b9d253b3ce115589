"""systemd's watchdog: a service reports itself as alive, and does not if a loop or a process has stalled."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.harness.ports import free_ports
from tests.harness.programs import eventually

INTERVAL = 0.05
SILENCE = 20 * INTERVAL
WATCHDOG = {"WATCHDOG_USEC": str(round(2 * INTERVAL * 1e6))}
WORKER = ("worker", "--processes", "2", "--threads", "1", "--metrics-port")
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    for name, value in WATCHDOG.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("command", ["scheduler", "exporter", "console"])
def test_a_service_reports_itself_when_it_is_ready(start, command):
    ports = free_ports(2)
    service = start(command, METRICS_PORT_EXPORTER=str(ports[0]), CONSOLE_PORT=str(ports[1]))
    told = []

    eventually(lambda: told.extend(service.told()) or "WATCHDOG=1" in told)

    assert "READY=1" in "".join(told)


def test_a_worker_reports_itself_while_each_of_its_processes_responds(start):
    (port,) = free_ports(1)
    worker = start(*WORKER, str(port))
    eventually(lambda: len(worker.said("worker ready")) == 2)
    eventually(lambda: "WATCHDOG=1" in worker.told())

    # A process that is stopped writes no readiness file. A minute passes by the file's content.
    (folder,) = Path(tempfile.gettempdir()).glob(f"forgekeeper-worker-*-{worker.pid}-*")
    file = next(folder.glob("*.ready"))
    os.kill(int(file.stem), signal.SIGSTOP)
    file.write_text("0")

    eventually(lambda: worker.is_silent(SILENCE))


def test_a_worker_without_the_files_of_its_processes_refuses_a_watchdog(start):
    worker = start(*WORKER, "0")

    assert worker.process.wait(60) == 2
    assert "WatchdogSec needs the metrics port of a worker" in worker.text()
