"""Peak memory of a worker process during a large case of a batch, compared with a small case.

Each round starts a new worker. It executes all small cases twice, the first time to load its modules, then all large
cases. Memory that an earlier large case leaves counts in later large cases, and in no small case.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.processes import environment, run, until, workers
from benchmarks.uploads import UPLOAD_KEYS
from demo.sample_data import add_imports, add_projects, add_ref_deletions, add_statuses, create_repository
from demo.servers import Servers
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.guards.register_epoch import forget_epochs
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.targets.sentinel import Folder
from workers.expired_job_artifacts import FLAG

SMALLER = 100
"""Factor between the large and the small case."""
TARGET = 1.2
RESET_PEAK = "5"
LOCATION = "artifacts"
UPLOADED = 24 * 60 * 60
PEAK = "VmHWM:"

ADD_ARTIFACTS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)
    select 1 + mod(number, 100), number, 1, 'artifacts.zip', 'artifacts/' || md5(number::text), 1000,
        now() - interval '1 hour', 0
    from generate_series(1, %s) as number
"""
ADD_OBJECTS = """
    insert into deleted_objects (store_dir, file, pick_up_at)
    select 'gone', md5(number::text), now() - interval '1 hour' from generate_series(1, %s) as number
"""
ADD_UPLOADS = """
    local then_ = redis.call('time')[1] - ARGV[2]
    for number = 1, ARGV[1] do redis.call('zadd', KEYS[1], then_, 'artifacts:uploads/' .. number) end
"""
ARTIFACTS_LEFT = "select exists (select from ci_job_artifacts)"
REFS_LEFT = "select exists (select from batched_git_ref_updates_deletions where status = 1)"
WORKER = "select pid from processes where kind = 'worker'"


@dataclass(frozen=True)
class Case:
    """A batch's work: *prepare* creates records, below a folder, and *batch* works on them.

    *large* is the number at full scale. *done* returns the number of records in a run's result; if children do the
    work, the query *left* tells whether records are left.
    """

    batch: str
    large: int
    prepare: Callable[[int, Path], object]
    done: Callable[[dict[str, Any]], int] | None = None
    left: str = ""


def _refs(count: int, folder: Path) -> None:
    names = [f"refs/merge-requests/{number}/head" for number in range(count)]
    (path,) = (made := add_projects(1)).values()
    create_repository(folder, path, names)
    add_ref_deletions([*made], names)


def _sql(statement: str) -> Callable[[int, Path], object]:
    return lambda count, _folder: database.execute_sql(statement, (count,))


def _uploads(count: int, _folder: Path) -> None:
    client.eval(ADD_UPLOADS, 1, UPLOAD_KEYS.pending, count, UPLOADED)


CASES = {
    # Of five samples two are due, and one is stale, with two entities.
    "statuses": Case(
        "user_status_cleanup",
        250_000,
        lambda count, _folder: add_statuses(count // 2 * 5),
        lambda result: result["deleted"],
    ),
    "artifacts": Case("expired_job_artifacts", 100_000, _sql(ADD_ARTIFACTS), left=ARTIFACTS_LEFT),
    "uploads": Case("stale_direct_uploads", 50_000, _uploads, lambda result: result["total_deleted_stale_entries"]),
    "imports": Case(
        "stale_imports",
        20_000,
        lambda count, _folder: add_imports(count // 2 * 5),
        lambda result: result["entities"],
    ),
    "objects": Case("delete_objects", 100_000, _sql(ADD_OBJECTS), lambda result: result["deleted"] + result["missing"]),
    "refs": Case("git_ref_cleanup", 20_000, _refs, left=REFS_LEFT),
}


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return a benchmark of each batch, with *scale* times the usual large case."""
    rounds = Rounds(servers, scale)
    return [
        Benchmark(
            f"memory_{name}",
            "MB",
            partial(rounds.peak, name, "large"),
            (Peer(f"{SMALLER} times less", partial(rounds.peak, name, "small"), TARGET),),
            less=True,
            about=f"Peak memory of a worker while {case.batch} does a hundred times as much work.",
        )
        for name, case in CASES.items()
    ]


class Rounds:
    """Measurements of a round for all batches, kept until each is requested."""

    def __init__(self, servers: Servers, scale: float) -> None:
        self._servers, self._scale = servers, scale
        self._peaks: dict[tuple[str, str], deque[float]] = defaultdict(deque)

    def peak(self, name: str, size: str) -> float:
        """Return the next round's peak, in megabytes."""
        if not self._peaks[name, size]:
            self._measure()
        return self._peaks[name, size].popleft()

    def _measure(self) -> None:
        folder = self._servers.folder / "memory"
        with database_of(self._servers, "memory") as settings:
            client.flushdb()
            forget_epochs()
            FeatureFlag.turn(FLAG, on=True)
            for place in ("repositories", "store"):
                shutil.rmtree(folder / place, ignore_errors=True)
                (folder / place).mkdir(parents=True)
                Folder(folder / place).create_sentinel(Installation.ensure_id())
            stores = json.dumps({LOCATION: f"file://{folder / 'store'}"})
            options = {"object_stores": stores, "repositories_root": folder / "repositories"}
            with workers(environment(settings, **options)):
                ((pid,),) = database.execute_sql(WORKER).fetchall()
                for size, smaller in (("loaded", SMALLER), ("small", SMALLER), ("large", 1)):
                    for name, case in CASES.items():
                        count = max(2, round(case.large * self._scale / smaller) // 2 * 2)
                        self._peaks[name, size].append(_peak(case, count, folder / "repositories", pid))


def _peak(case: Case, count: int, folder: Path, pid: int) -> float:
    """Let the worker process *count* records; return its peak resident memory in MB."""
    case.prepare(count, folder)
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
    _seconds, result = run(case.batch)
    if case.done is not None:
        assert case.done(result) == count, f"{case.done(result)} of {count} were done: {result}"
    elif case.left:
        until(lambda: not database.execute_sql(case.left).fetchone()[0])
    return _megabytes(pid)


def _megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(PEAK)) / 1024
