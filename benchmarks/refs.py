"""Ten thousand refs of a large repository: our child compared with `git update-ref`, at once and by hundreds."""

from __future__ import annotations

import gc
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from benchmarks import processes
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.sample_data import create_repository, list_refs
from demo.servers import Servers
from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.engine.attempt import Runner
from forgekeeper.engine.message_attempt import execute_message
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import sentinel
from models import GitRefDeletion
from workers.git_ref_cleanup import MAX_DELETES, clean_project_refs

REFS, MILLION = 200_000, 1_000_000
BY_HUNDREDS = 10
"""Chunks of a hundred refs that are measured: each takes the same time."""
PROJECT, DISK_PATH = 1, "a/project.git"
MEMORY = Path("/dev/shm")
"""Memory file system, on which git takes a fifth of its time on a disk, without variation."""
TARGET_ON_DISK, TARGET_IN_MEMORY = 0.7, 0.5
FORGET = "truncate batched_git_ref_updates_deletions, projects"
ADD = """
    insert into batched_git_ref_updates_deletions (project_id, ref, expected_oid)
    select %(project)s, ref, %(oid)s from unnest(%(refs)s::text[]) as ref
"""


@dataclass(frozen=True)
class World:
    """A repository with *refs*, and the number of *doomed* refs to delete."""

    servers: Servers
    refs: int
    doomed: int
    loose: bool = False
    expected: bool = False
    in_memory: bool = False

    def ours(self, *, worker: bool = False) -> float:
        """Let our child delete the refs, called or sent to a worker; return the rate per second."""
        with self._repository() as (root, names, oid), self._forge(root) as settings:
            _ask_for(names, oid if self.expected else None)
            seconds = _sent(settings, root) if worker else _called(settings)
            assert not GitRefDeletion.select_pending().exists(), "rows are pending"
            self._check(root, len(names))
        return len(names) / seconds

    def bare(self, *, by: int, most: int) -> float:
        """Let git delete *most* refs, *by* refs per transaction; return the rate per second."""
        with self._repository() as (root, doomed, oid):
            names = doomed[:most]
            parts = [names[start : start + by] for start in range(0, len(names), by)]
            began = monotonic()
            for part in parts:
                _update_ref(root / DISK_PATH, part, oid if self.expected else "")
            seconds = monotonic() - began
            self._check(root, len(names))
        return len(names) / seconds

    @contextmanager
    def _repository(self) -> Iterator[tuple[Path, list[str], str]]:
        """Create the repository; yield its root, the refs to delete, and the object of all refs."""
        place = MEMORY if self.in_memory else None
        with TemporaryDirectory(prefix="forgekeeper-benchmark-", dir=place) as folder:
            root, git_dir = Path(folder), Path(folder) / DISK_PATH
            create_repository(root, DISK_PATH, [])
            oid = subprocess.check_output(["git", f"--git-dir={git_dir}", "rev-parse", "main"], text=True).strip()
            dice = random.Random(58)
            names = [
                f"refs/{dice.choice(('heads', 'tags', 'merge'))}/{dice.getrandbits(64):016x}" for _ in range(self.refs)
            ]
            doomed = dice.sample(names, self.doomed)
            packed = set(names) - set(doomed) if self.loose else names
            lines = sorted(f"{oid} {name}\n" for name in (*packed, "refs/heads/main"))
            (git_dir / "packed-refs").write_text("# pack-refs with: peeled fully-peeled sorted \n" + "".join(lines))
            for name in doomed if self.loose else ():
                (git_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (git_dir / name).write_text(f"{oid}\n")
            yield root, doomed, oid

    @contextmanager
    def _forge(self, root: Path) -> Iterator[Settings]:
        with database_of(self.servers, "refs", repositories_root=root, breaker_share=1) as settings:
            sentinel.Folder(root).create_sentinel(Installation.ensure_id())
            client.flushdb()
            database.execute_sql(FORGET)
            database.execute_sql("insert into projects values (%s, %s)", (PROJECT, DISK_PATH))
            yield settings

    def _check(self, root: Path, deleted: int) -> None:
        left = len(list_refs(root / DISK_PATH))
        assert left == self.refs + 1 - deleted, f"{left} refs of {self.refs} are left after {deleted} were deleted"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 10,000 refs, of 200,000 or a million."""
    count = partial(World, servers, round(REFS * scale), round(MAX_DELETES * scale))
    million = World(servers, round(MILLION * scale), round(MAX_DELETES * scale))
    packed = count()
    return [
        _beside("refs", packed, 6),
        _beside("refs_expected", count(expected=True), 6),
        *([_beside("refs_in_memory", count(in_memory=True), 6)] if MEMORY.is_dir() else []),
        # Loose refs need no rewrite of packed-refs, so one transaction is not faster than many.
        _beside("refs_loose", count(loose=True), 0),
        _beside("refs_million", million, 15),
        Benchmark("refs_worker", "refs/s", partial(packed.ours, worker=True), (_floor(packed),)),
    ]


def _beside(name: str, world: World, hundreds: float) -> Benchmark:
    by_hundreds = partial(world.bare, by=100, most=100 * BY_HUNDREDS)
    return Benchmark(name, "refs/s", world.ours, (_floor(world), Peer("by hundreds", by_hundreds, hundreds)))


def _floor(world: World) -> Peer:
    target = TARGET_IN_MEMORY if world.in_memory else TARGET_ON_DISK
    return Peer("one update-ref", partial(world.bare, by=world.doomed, most=world.doomed), target)


def _ask_for(names: list[str], oid: str | None) -> None:
    database.execute_sql(ADD, {"project": PROJECT, "refs": names, "oid": oid})
    database.execute_sql("analyze batched_git_ref_updates_deletions")


def _called(settings: Settings) -> float:
    runner = Runner(settings, lambda *_sent: EnqueueCounts(0))
    gc.freeze()  # as a worker process does
    began = monotonic()
    calls = [(f"clean_project_refs:{PROJECT}", (PROJECT,))]
    (attempt,) = execute_message(runner, clean_project_refs, calls, 1).ended
    seconds = monotonic() - began
    runner.stop()
    assert attempt.error is None, attempt.error
    return seconds


def _sent(settings: Settings, root: Path) -> float:
    """Let a worker run the child; return the seconds since the start of the run that sent it."""
    options = processes.environment(settings, repositories_root=root)
    with processes.workers(options):
        began = monotonic()
        processes.run("git_ref_cleanup")
        processes.until(lambda: not GitRefDeletion.select_pending().exists())
        return monotonic() - began


def _update_ref(git_dir: Path, names: list[str], oid: str) -> None:
    # Without that setting git looks for each name in six more places.
    command = ["git", "-c", "core.warnAmbiguousRefs=false", f"--git-dir={git_dir}"]
    commands = "".join(f"delete {name}\0{oid}\0" for name in names)
    subprocess.run([*command, "update-ref", "--stdin", "-z", "--no-deref"], input=commands, text=True, check=True)
