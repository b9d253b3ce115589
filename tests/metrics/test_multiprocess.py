"""What processes have counted is read together, the dead ones' too."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict

from metrics import multiprocess

from .pages import read

ROOT = Path(__file__).parents[2]
COUNT = """
import os
from metrics.counting import WORKER

for _ in range(2):
    if os.fork() == 0:
        WORKER.inc("forgekeeper_runs_total", "prune")
        WORKER.inc("forgekeeper_runs_in_progress", "prune")
        os._exit(0)
    os.wait()
"""


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
    registry.register(multiprocess.Multiprocess(tmp_path))

    page = read(generate_latest(registry).decode())

    assert page.value("runs_total", batch="prune") == 2
    assert not page.value("runs_in_progress", batch="prune")


def test_the_clients_files_have_no_room_of_their_own(tmp_path):
    """Where this fails, the patch in `metrics/counting.py` may go."""
    MmapedDict(str(tmp_path / "counter.db")).close()

    made = (tmp_path / "counter.db").stat()

    assert made.st_blocks * 512 < made.st_size


WATCH = """
from pathlib import Path
from metrics.multiprocess import Watch

Watch("127.0.0.1", 0).start()
children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
# That of a program which the kernel has just begun is empty for a moment.
print([Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes() for pid in children])
"""


def test_the_endpoint_is_a_process_before_its_worker_forks(tmp_path):
    """`Popen` would wait for one that is still being made until the worker processes have ended."""
    assert run(WATCH, tmp_path / "counts") == "[False]\n"
