"""What processes have counted is read together, the dead ones' too."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from metrics import multiprocess
from tests.harness.catalogue import METRICS

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


def test_the_dead_are_added_up_once_however_often_one_looks(tmp_path):
    registry, merged = CollectorRegistry(), multiprocess.Multiprocess(tmp_path, METRICS)
    registry.register(merged)
    for _ in range(2):
        count_everything(tmp_path, 2)
        before = read(generate_latest(registry).decode())
        merged.bury()
        merged.bury()
        after = read(generate_latest(registry).decode())

    ended = "forgekeeper_runs_in_progress"
    assert after.value("runs_total", batch=NAME) == 4
    assert {key: value for key, value in after.samples.items() if key[0] != ended} == {
        key: value for key, value in before.samples.items() if key[0] != ended
    }
    assert after.value("runs_in_progress", batch=NAME) == 0


def test_a_file_that_a_process_died_making_spoils_no_page(tmp_path):
    registry, merged = CollectorRegistry(), multiprocess.Multiprocess(tmp_path, METRICS)
    registry.register(merged)
    count_everything(tmp_path, 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"counter_{ended.pid}.db").touch()

    before = read(generate_latest(registry).decode())
    merged.bury()
    after = read(generate_latest(registry).decode())

    assert (before.value("runs_total", batch=NAME), after.value("runs_total", batch=NAME)) == (1, 1)


def test_a_folder_that_is_gone_is_an_empty_page_and_no_zeros(tmp_path):
    registry = CollectorRegistry()
    registry.register(multiprocess.Multiprocess(tmp_path / "gone", METRICS))

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


def test_a_hundred_dead_processes_are_read_in_a_tenth_of_a_second(tmp_path):
    count_everything(tmp_path, 100)
    registry, merged = CollectorRegistry(), multiprocess.Multiprocess(tmp_path, METRICS)
    registry.register(merged)
    pages, seconds = [], []
    merged.bury()
    for _ in range(5):
        began = time.monotonic()
        pages.append(generate_latest(registry).decode())
        seconds.append(time.monotonic() - began)

    assert read(pages[-1]).value("runs_total", batch=NAME) == 100
    assert read(pages[-1]).value("run_duration_seconds_count", batch=NAME) == 100
    assert read(pages[-1]).value("runs_in_progress", batch=NAME) == 0
    # The quickest of five: a busy machine gives the processor to others in between.
    assert min(seconds) < 0.1, seconds
