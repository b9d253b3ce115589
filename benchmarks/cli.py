"""CPU time of commands, most of it for imports."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.processes import ROOT, environment
from demo.servers import Servers

WANTED = {"cli_help": 0.6, "cli_status": 1.0}
OURS = ("forgekeeper", "metrics", "workers", "demo", "models.py", "scheduler.py")
HELP_IMPORTS = "import typer, typer.rich_utils"
STATUS_IMPORTS = (
    "import orjson, peewee, playhouse.pool, psycopg2, pydantic_settings, redis, rich.table, structlog, typer"
)
"""Libraries that the command needs; a process that only imports them is its floor."""


def benchmarks(servers: Servers, _scale: float) -> list[Benchmark]:
    """Return the benchmarks of `--help` and `status`, which do not depend on the scale."""
    return [
        _of("cli_help", _help, HELP_IMPORTS),
        _of("cli_status", partial(_status, servers), STATUS_IMPORTS),
    ]


def _of(name: str, ours: Callable[[], float], imports: str) -> Benchmark:
    wanted = Peer(f"{WANTED[name]} s", lambda: WANTED[name], 1.0)
    # The second ratio is not a target: it shows the share of the libraries.
    return Benchmark(
        name, "CPU s", ours, (wanted, Peer("its libraries alone", partial(_floor, imports), 2.0)), less=True
    )


def _help() -> float:
    taken, said = _taken("-m", "forgekeeper.cli", "--help", given=_bare())
    assert {"status", "uploads", "quarantine"} <= set(said.split()), said
    return taken


def _status(servers: Servers) -> float:
    with database_of(servers, "benchmark_cli") as settings:
        taken, said = _taken("-m", "forgekeeper.cli", "status", given=environment(settings))
    assert {"user_status_cleanup", "Workers:"} <= set(said.split()), said
    return taken


def _floor(imports: str) -> float:
    return _taken("-c", imports, given=_bare())[0]


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FORGEKEEPER_")}


@cache
def _compile() -> None:
    """Compile our modules, as pip does; otherwise each command would compile them again."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", *OURS], cwd=ROOT, check=True)


def _taken(*arguments: str, given: Mapping[str, str]) -> tuple[float, str]:
    """Run Python with *arguments*; return the CPU seconds and the output."""
    _compile()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, *arguments], env=given, cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stdout
