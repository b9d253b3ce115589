"""Facts about the measurements' environment: machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psycopg2
import redis

from demo.servers import Servers

PACKAGES = ("dramatiq", "celery", "psycopg2-binary", "redis", "obstore", "boto3")
UNKNOWN = "unknown"


def described(servers: Servers) -> dict[str, str | int | float]:
    """Return usable cores, model and memory, and the versions of programs and packages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "model": _line("/proc/cpuinfo", "model name"),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "PostgreSQL": _postgres(servers.database_url),
        "Redis": _redis(servers.redis_url),
        "git": _git(),
        **{name: _package(name) for name in PACKAGES},
    }


def date(servers: Servers) -> str:
    """Return the time by PostgreSQL's clock, in UTC."""
    with closing(psycopg2.connect(servers.database_url)) as connection, connection.cursor() as cursor:
        cursor.execute("select clock_timestamp() at time zone 'utc'")
        ((instant,),) = cursor.fetchall()
    return f"{instant:%Y-%m-%dT%H:%M:%S}+00:00"


def _line(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return UNKNOWN


def _postgres(url: str) -> str:
    with closing(psycopg2.connect(url)) as connection:
        number = connection.info.server_version
    return f"{number // 10_000}.{number % 10_000}"


def _redis(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        return str(client.info("server")["redis_version"])


def _git() -> str:
    try:
        done = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.removeprefix("git version ").strip()


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
