"""Projects with a few refs each, through one worker process: our fan-out and children beside a bare actor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import dramatiq

from benchmarks import bare_refs, processes
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.sample_data import create_repository, list_refs
from demo.servers import Servers
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import sentinel
from models import GitRefDeletion

SHAPES = {"ref_children": (1_000, 5), "ref_children_single": (10_000, 1)}
"""Projects and refs of each at full size."""
WORKER = ("--processes", "1", "--threads", "8")
TEMPLATE = "template.git"
FORGET = "truncate batched_git_ref_updates_deletions, projects, quarantine"
ADD_PROJECTS = "insert into projects select one, 'a/' || one || '.git' from generate_series(1, %s) as one"
ADD_REFS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project, ref from generate_series(1, %s) as project, unnest(%s::text[]) as ref
"""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times their projects."""
    return [
        Benchmark(
            name,
            "projects/s",
            partial(_measure_ours, servers, round(projects * scale), refs),
            (Peer("bare Dramatiq", partial(_measure_bare, servers, round(projects * scale), refs), 0.6),),
        )
        for name, (projects, refs) in SHAPES.items()
    ]


def _measure_ours(servers: Servers, projects: int, refs: int) -> float:
    """Let a worker do the run and its children; return the projects per second."""
    with _forge(servers, projects, refs) as (settings, root):
        with processes.workers(processes.environment(settings, repositories_root=root)):
            began = monotonic()
            processes.run("git_ref_cleanup")
            processes.until(_is_done)
            seconds = monotonic() - began
        _check(root, projects)
    return projects / seconds


def _measure_bare(servers: Servers, projects: int, refs: int) -> float:
    """Let the bare worker do the messages; return the projects per second."""
    with _forge(servers, projects, refs) as (settings, root):
        urls = settings.require_redis(), settings.require_database()
        actor = bare_refs.declare(*urls, root)
        with _bare_worker(*urls, str(root)):
            # A message is processed only once the worker is ready, so connecting and imports are not measured.
            actor.send(1)
            processes.until(lambda: GitRefDeletion.select_pending().count() < projects * refs)
            began = monotonic()
            dramatiq.group([actor.message(project) for project in range(2, projects + 1)], broker=actor.broker).run()
            processes.until(_is_done)
            seconds = monotonic() - began
        actor.broker.close()
        _check(root, projects)
    return (projects - 1) / seconds


@contextmanager
def _bare_worker(*arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.bare_refs", *arguments, *WORKER]
    process = subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _forge(servers: Servers, projects: int, number_of_refs: int) -> Iterator[tuple[Settings, Path]]:
    """Create the repositories and pending rows; yield the settings and the root."""
    refs = [f"refs/merge-requests/{number}/head" for number in range(1, number_of_refs + 1)]
    with TemporaryDirectory(prefix="forgekeeper-benchmark-") as folder:
        root = Path(folder)
        with database_of(servers, "ref_children", repositories_root=root, breaker_share=1) as settings:
            create_repository(root, TEMPLATE, refs)
            for project in range(1, projects + 1):
                shutil.copytree(root / TEMPLATE, root / "a" / f"{project}.git")
            sentinel.Folder(root).create_sentinel(Installation.ensure_id())
            client.flushdb()
            database.execute_sql(FORGET)
            database.execute_sql(ADD_PROJECTS, (projects,))
            database.execute_sql(ADD_REFS, (projects, refs))
            database.execute_sql("analyze batched_git_ref_updates_deletions, projects")
            yield settings, root


def _is_done() -> bool:
    return not GitRefDeletion.select_pending().exists()


def _check(root: Path, projects: int) -> None:
    left = sum(list_refs(root / "a" / f"{project}.git") != {"refs/heads/main"} for project in range(1, projects + 1))
    assert not left, f"the refs of {left} of {projects} projects are wrong"
