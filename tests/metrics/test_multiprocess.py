"""What processes have counted is read together, the dead ones' too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict

from metrics import multiprocess

from .pages import read

ROOT = Path(__file__).parents[2]
NAME = "user_status_cleanup"
COUNT_EVERYTHING = """
import os, sys
import workers
from forgekeeper.batches import all_declared
from metrics.catalogue import of, table
from metrics.counting import Instruments

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


def test_what_the_dead_have_counted_stays_and_their_gauges_go(tmp_path, scraped):
    count_everything(tmp_path, 2)

    page = scraped()

    assert page.value("runs_total", batch=NAME) == 2
    assert page.value("run_duration_seconds_count", batch=NAME) == 2
    assert not page.value("runs_in_progress", batch=NAME)


def test_a_file_that_a_process_is_making_or_died_making_spoils_nothing(tmp_path, scraped):
    count_everything(tmp_path, 1)
    (tmp_path / f"counter_{os.getpid()}.db").touch()

    assert scraped().value("runs_total", batch=NAME) == 1


def test_the_clients_files_have_no_room_of_their_own(tmp_path):
    """Where this fails, the patch in `metrics/counting.py` may go."""
    MmapedDict(str(tmp_path / "counter.db")).close()

    made = (tmp_path / "counter.db").stat()

    assert made.st_blocks * 512 < made.st_size


WATCH = """
from pathlib import Path
from metrics.multiprocess import Watch

Watch("127.0.0.1", 0).start()
mine = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
for pid in mine:
    # The kernel says so a moment after it has made the process.
    while not (line := Path(f"/proc/{pid}/cmdline").read_bytes()):
        pass
    print(line.split(b"\\0")[3].decode())
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

    assert said.stdout == "metrics.multiprocess\n"
