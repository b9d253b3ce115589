"""The page: what processes have counted is read together, and who asks for it badly is a line in the log."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector

from metrics import endpoint as pages
from metrics import threads
from metrics.endpoint import MetricsEndpoint, WorkerMetricsCollector, create_metrics_folder, open_listening_socket
from tests.harness.waiting import wait_until

from .pages import read

LIMIT = 60.0
ROOT = Path(__file__).parents[2]
COUNT = """
import os
from metrics.instruments import WORKER_METRICS

for _ in range(2):
    if os.fork() == 0:
        WORKER_METRICS.inc("forgekeeper_runs_total", "prune")
        WORKER_METRICS.inc("forgekeeper_runs_in_progress", "prune")
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(pages._RequestHandler, "timeout", LIMIT)
    running = []

    def start(registry):
        running.append(MetricsEndpoint(open_listening_socket("127.0.0.1", 0), registry))
        running[-1].start()
        return running[-1]

    yield start
    for page in running:
        page.shutdown()
        page.server_close()


@pytest.fixture
def page(serve):
    return serve(CollectorRegistry())


def silent(page):
    return socket.create_connection(("127.0.0.1", page.server_port), LIMIT)


def resetting(page):
    client = silent(page)
    client.send(b"GET /me")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("client", [silent, resetting])
def test_a_client_that_does_it_badly_is_a_line_and_no_trace(page, stream, capfd, client, monkeypatch):
    monkeypatch.setattr(pages._RequestHandler, "timeout", 0.5)
    kept = client(page)

    assert wait_until(lambda: stream.getvalue().endswith("\n"), LIMIT)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["client"]) == ("info", "scrape aborted", "127.0.0.1")
    assert capfd.readouterr().err == ""
    if kept:
        kept.close()


class Broken(Collector):
    """Metrics that cannot be told."""

    def collect(self):
        raise ArithmeticError("\x1bxxx " + "x " * 1_000_000)


def test_a_page_that_cannot_be_made_is_a_line_with_the_trace(serve, stream, capfd):
    registry = CollectorRegistry()
    registry.register(Broken())
    page = serve(registry)

    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(page.url, timeout=LIMIT)

    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"]) == ("error", "scrape failed")
    assert "ArithmeticError: \\x1bxxx" in line["exception"]
    assert len(stream.getvalue()) < 10_000
    assert capfd.readouterr().err == ""


def run(program, folder):
    """Run it, and let it count in the folder; return what it says."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_what_the_dead_have_counted_stays_their_gauges_go_and_a_file_that_is_just_made_spoils_nothing(tmp_path):
    run(COUNT, tmp_path)
    (tmp_path / f"counter_{os.getpid()}.db").touch()
    registry = CollectorRegistry()
    registry.register(WorkerMetricsCollector(tmp_path))

    page = read(generate_latest(registry).decode())

    assert page.value("runs_total", batch="prune") == 2
    assert not page.value("runs_in_progress", batch="prune")


def test_the_clients_files_have_no_room_of_their_own(tmp_path):
    """If this fails, remove the patch in `metrics/full_disk.py`."""
    MmapedDict(str(tmp_path / "counter.db")).close()

    made = (tmp_path / "counter.db").stat()

    assert made.st_blocks * 512 < made.st_size


WATCH = """
from pathlib import Path
from metrics.endpoint import EndpointWatch

EndpointWatch("127.0.0.1", 0).start()
children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
# That of a program which the kernel has just begun is empty for a moment.
print([Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes() for pid in children])
"""


def test_the_endpoint_is_a_process_before_its_worker_forks(tmp_path):
    """`Popen` would wait for one that is still being made until the worker processes have ended."""
    assert run(WATCH, tmp_path / "counts") == "[False]\n"


UNSTARTED = """
import sys
from structlog.testing import capture_logs
from metrics import endpoint, threads
from tests.harness.waiting import wait_until

sys.executable, endpoint.RESTART_PAUSE_SECONDS, endpoint.THREAD_START_SECONDS = "/nonexistent", 0.01, 0.1
watch = endpoint.EndpointWatch("127.0.0.1", 0)
with capture_logs() as lines:
    watch.start()
    wait_until(lambda: len(lines) > threads.MAX_FAILED_TURNS or not watch.is_alive(), 60)
print(watch.is_alive(), {line["event"] for line in lines})
"""


def test_an_endpoint_that_cannot_be_started_again_and_again_does_not_end_its_worker(tmp_path):
    assert run(UNSTARTED, tmp_path / "counts") == "True {'metrics endpoint not started'}\n"


def test_the_folder_of_a_dead_process_that_had_the_id_of_this_one_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    create_metrics_folder()

    now = create_metrics_folder()

    assert list(tmp_path.iterdir()) == [now]


def ask(page, path):
    """Return the status and the text of the answer."""
    try:
        with urllib.request.urlopen(page.url.replace("/metrics", path), timeout=LIMIT) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode().strip()


class Hanging(Collector):
    """Metrics that wait for a server."""

    def __init__(self):
        self.asked, self.answered = threading.Event(), threading.Event()

    def describe(self):
        return []

    def collect(self):
        self.asked.set()
        self.answered.wait(LIMIT)
        return []


def test_probes_are_answered_while_a_scrape_waits_for_a_server(serve):
    registry, hanging = CollectorRegistry(), Hanging()
    registry.register(hanging)
    page = serve(registry)
    scrape = threading.Thread(target=ask, args=(page, "/metrics"))
    scrape.start()
    hanging.asked.wait(LIMIT)

    answers = [ask(page, path) for path in ("/livez", "/readyz")]

    assert (answers, scrape.is_alive()) == ([(200, "alive"), (200, "ready")], True)
    hanging.answered.set()
    scrape.join(LIMIT)


def test_other_addresses_are_not_found_and_the_old_one_says_its_new_name(page):
    assert [ask(page, path)[0] for path in ("/", "/metric", "/livez/more")] == [404, 404, 404]
    assert ask(page, "/ready") == (200, "ready; /ready is called /readyz now, and is removed with the next release")


class Turning(threads.CriticalThread):
    """A loop at one turn, which ends when *wait* returns."""

    def __init__(self, wait):
        super().__init__("turning")
        self.wait = wait

    def run_until_stopped(self):
        self.take_turn(self.wait)
        self.stopped.set()


def test_a_loop_that_stands_still_fails_the_probe_of_life(page, monkeypatch):
    monkeypatch.setattr(threads, "STALLED_AFTER_SECONDS", 0.0)
    done = threading.Event()
    loop = Turning(lambda: done.wait(LIMIT))
    loop.start()
    assert wait_until(lambda: loop.turn_began is not None, LIMIT)

    status, said = ask(page, "/livez")

    assert (status, said.startswith("the loop 'turning' has not finished its turn for")) == (503, True)
    done.set()
    loop.join(LIMIT)
    assert ask(page, "/livez") == (200, "alive")


def test_a_loop_that_waits_for_a_server_that_hangs_lives(page, monkeypatch):
    monkeypatch.setattr(threads, "STALLED_AFTER_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"redis://127.0.0.1:{server.getsockname()[1]}"
        loop = Turning(redis.from_url(address, socket_timeout=LIMIT, retry=None).ping)
        loop.start()
        connection, _ = server.accept()
        assert connection.recv(1)

        answer = ask(page, "/livez")
        loop.stopped.set()
        connection.close()

    assert answer == (200, "alive")


def test_a_process_of_a_worker_that_gives_no_sign_of_life_is_named(tmp_path):
    (tmp_path / f"{os.getpid()}.ready").write_text(str(time.monotonic()))
    (tmp_path / "999999999.ready").write_text("0")
    assert pages.find_stalled_process(tmp_path) is None

    (tmp_path / f"{os.getpid()}.ready").write_text(str(time.monotonic() - threads.STALLED_AFTER_SECONDS - 1))

    said = pages.find_stalled_process(tmp_path)
    assert said.startswith(f"process {os.getpid()} of this worker has not responded for")
