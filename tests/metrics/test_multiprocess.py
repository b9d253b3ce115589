"""What processes have counted is read together, the dead ones' too."""

import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from metrics import multiprocess

from .pages import read

ROOT = Path(__file__).parents[2]
NAME = "user_status_cleanup"
COUNT_EVERYTHING = """
import os, sys
import workers
from forgekeeper.batches import all_declared
from metrics.catalogue import of, table
from metrics.instruments import Instruments

known = table(all_declared())
count = Instruments("worker").know(known)
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        for metric in of("worker", known):
            for labels in metric.children:
                if metric.type == "histogram":
                    count.observe(metric.name, *labels, seconds=1.0)
                else:
                    count.inc(metric.name, *labels)
        os._exit(0)
    os.wait()
"""


def count_everything(folder, processes):
    """Let processes count everything once, and die."""
    subprocess.run(
        [sys.executable, "-c", COUNT_EVERYTHING, str(processes)],
        env={"PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        check=True,
    )


@pytest.fixture
def scraped(tmp_path):
    registry = CollectorRegistry()
    registry.register(multiprocess.Multiprocess(tmp_path))
    return lambda: read(generate_latest(registry).decode())


def test_the_dead_are_added_up_once_and_their_files_go(tmp_path, scraped):
    for rounds in (1, 2):
        count_everything(tmp_path, 2)
        for _ in range(2):
            page = scraped()

            assert page.value("runs_total", batch=NAME) == 2 * rounds
            assert page.value("run_duration_seconds_count", batch=NAME) == 2 * rounds
            assert not page.value("runs_in_progress", batch=NAME)
    assert {file.name for file in tmp_path.iterdir()} == {"counter_dead.db", "histogram_dead.db"}


def test_a_file_that_a_process_is_making_or_died_making_spoils_nothing(tmp_path, scraped):
    count_everything(tmp_path, 1)
    (tmp_path / f"counter_{os.getpid()}.db").touch()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"counter_{ended.pid}.db").touch()

    assert scraped().value("runs_total", batch=NAME) == 1


def test_a_folder_that_is_gone_is_an_empty_answer_and_no_zeros(tmp_path):
    registry = CollectorRegistry()
    registry.register(multiprocess.Multiprocess(tmp_path / "gone"))

    assert generate_latest(registry) == b""


def test_a_worker_that_starts_removes_no_folder_of_one_that_starts_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = threading.Event()

    def others():
        while not over.is_set():
            multiprocess.remove_abandoned()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(others)
        try:
            made = [multiprocess.locked_folder() for _ in range(300)]
        finally:
            over.set()
        ended.result()

    assert [folder for folder, _ in made if not folder.is_dir()] == []
    for _, lock in made:
        os.close(lock)


WATCH = """
from pathlib import Path
from metrics.multiprocess import Watch

Watch("127.0.0.1", 0).start()
mine = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
print([Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[3].decode() for pid in mine])
"""


def test_the_endpoint_is_a_process_before_its_worker_forks(tmp_path):
    """`Popen` would wait for one that is still being made until the worker processes have ended."""
    said = subprocess.run(
        [sys.executable, "-c", WATCH],
        env={"PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "counts")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert said.stdout == "['metrics.multiprocess']\n"
