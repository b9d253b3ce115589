"""The console on a large installation: time of each page, memory, and PostgreSQL's load by fifty viewers.

The database has 10,000 runs, 100,000 children in quarantine and 10,000,000 rows of the audit.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.processes import ROOT, environment, until
from benchmarks.serving import Shared
from demo.servers import Servers
from forgekeeper.cli.console.pages import DECLARED_PAGES, load_pages
from forgekeeper.cli.console.reading import ANSWER_VALID_SECONDS
from forgekeeper.platform.database import database

RUNS, LETTERS, ROWS, ACTS = 10_000, 100_000, 10_000_000, 100_000
ASKED = 7
"""Requests per page; the median counts."""
VIEWERS, FOR = 50, 20.0
RENEWED = 0.5
"""Seconds after an answer until a page renews itself, as in console.js."""
FILL = """
    insert into job_runs (batch, tick, state, attempt, claimed_by, claimed_at, started_by, started_at, finished_at,
        result)
    select 'user_status_cleanup', now() - (%(runs)s - n) * interval '1 minute', 'succeeded', 1, 'host:1',
        now() - (%(runs)s - n) * interval '1 minute', 'host:2', now() - (%(runs)s - n) * interval '1 minute',
        now() - (%(runs)s - n) * interval '1 minute' + interval '3 s', jsonb_build_object('deleted', n)
    from generate_series(1, %(runs)s) as n;
    insert into run_totals (batch, run, day, records, bytes)
    select batch, id, (finished_at at time zone 'UTC')::date, 100, 0 from job_runs;
    insert into quarantine (batch, record, key, reason, error, failures, since, failed_at, retry_at)
    select 'git_ref_cleanup', 'clean_project_refs', n, 'child_failed', 'OSError: disk ' || n || ' is full', 25,
        now() - n * interval '1 s', now(), 'infinity'
    from generate_series(1, %(letters)s) as n;
    insert into audit_acts (at, act, what, batch, by_user, by_host, actor, reason)
    select now() - (%(acts)s - n) * interval '10 s', 'pause', 'user_status_cleanup', 'user_status_cleanup', 'root',
        'host', 'alice', 'reason ' || n
    from generate_series(1, %(acts)s) as n;
    insert into audit_deletions (at, batch, record, run, phase, ids, hashes, detail)
    select clock_timestamp() - (%(rows)s - n) * interval '50 ms', 'user_status_cleanup', 'user_status',
        1 + n * %(runs)s / (%(rows)s + 1), 'done', array_fill(n, array[20]), '{}', '{}'
    from generate_series(1::bigint, %(rows)s) as n;
    analyze;
"""
NEWEST = "select (select max(id) from quarantine), (select max(id) from job_runs)"
SAID = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


class Measured(NamedTuple):
    """Duration of the slowest page in seconds, and peak memory of the process in MB."""

    page: str
    seconds: float
    memory: float


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times such an installation, and of viewers."""
    pages = Shared(partial(_pages, servers, scale))
    promised = (Peer("promised", lambda: 200.0, 1.0),)
    one = Peer("one viewer", partial(_transactions, servers, scale, 1), 1.2)
    return [
        Benchmark("console_page", "ms", pages.figure(lambda found: 1000 * found.seconds), promised, less=True),
        Benchmark("console_memory", "MB", pages.figure(lambda found: found.memory), promised, less=True),
        Benchmark("console_viewers", "/s", partial(_transactions, servers, scale, VIEWERS), (one,), less=True),
    ]


def _pages(servers: Servers, scale: float) -> Measured:
    with _console(servers, scale) as (url, pid):
        found: dict[str, list[float]] = {}
        for page in _addresses():
            until(partial(_is_current, url + page), within=60)
        for turn in range(ASKED):
            for page in _addresses():
                began = time.monotonic()
                _get(url + page)
                found.setdefault(page, []).append(time.monotonic() - began)
            if turn < ASKED - 1:
                time.sleep(ANSWER_VALID_SECONDS)  # until the cached answer has expired
        for page, seconds in found.items():
            sys.stderr.write(f"{page}: {1000 * median(seconds):.0f} ms, {1000 * max(seconds):.0f} at most\n")
        page, seconds = max(found.items(), key=lambda one: median(one[1]))
        return Measured(page, median(seconds), _memory(pid))


def _addresses() -> list[str]:
    """Return three audit queries and every page but the preview, which uses its time limit."""
    letter, run = database.execute_sql(NEWEST).fetchone()
    parts = {"batch": "user_status_cleanup", "run": str(run), "id": str(letter), "name": "quarantine"}
    load_pages()
    found = [
        re.sub(r"{(\w+)(?::\w+)?}", lambda found: parts[found[1]], page.address)
        for page in DECLARED_PAGES
        if page.template != "preview.html" and set(re.findall(r"{(\w+)", page.address)) <= parts.keys()
    ]
    return [*found, f"/audit?run={run}", "/audit?project=7", "/audit?who=alice"]


def _transactions(servers: Servers, scale: float, viewers: int) -> float:
    """Let *viewers* watch the first page; return PostgreSQL's transactions per second."""
    with _console(servers, scale) as (url, _pid):
        ended = threading.Event()
        threads = [threading.Thread(target=_look, args=(url + "/", ended)) for _ in range(viewers)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        before, began = _said(), time.monotonic()
        time.sleep(FOR)
        rate = (_said() - before) / (time.monotonic() - began)
        ended.set()
        for thread in threads:
            thread.join()
        return rate


def _look(url: str, ended: threading.Event) -> None:
    while not ended.wait(RENEWED):
        _get(url)


def _said() -> int:
    # A session reports its transactions within a second; our own queries count equally for all.
    with database.atomic():
        database.execute_sql("select pg_stat_clear_snapshot()")
        return int(database.execute_sql(SAID).fetchone()[0])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _is_current(url: str) -> bool:
    return 'role="alert"><strong>Not up' not in _get(url)


def _memory(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


@contextmanager
def _console(servers: Servers, scale: float) -> Iterator[tuple[str, int]]:
    """Run a console of a filled database; yield its address and process id."""
    with database_of(servers, "console") as settings:
        if database.execute_sql("select not exists (select from job_runs)").fetchone()[0]:
            amounts = {"runs": RUNS, "letters": LETTERS, "rows": ROWS, "acts": ACTS}
            with database.atomic():
                database.execute_sql("set local statement_timeout = 0")
                database.execute_sql(FILL, {name: max(10, round(of * scale)) for name, of in amounts.items()})
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        given = environment(settings, console_port=port) | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "forgekeeper.cli", "console"]
        process = subprocess.Popen(command, env=given, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _answers(url), within=60)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    with suppress(OSError):
        _get(url + "/static/console.css")
        return True
    return False
