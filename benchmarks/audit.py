"""The cost of the audit for artifacts: with all deletions, with only acts of people, and without audit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, process_time

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.engine.attempt import Runner
from forgekeeper.engine.message_attempt import execute_message
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.buckets import BucketSet
from workers.expired_job_artifacts import BUCKETS, FLAG, MAX_BUCKETS, delete_artifact_bucket

ARTIFACTS = 100_000
PROJECTS = 100
TICK = os.sysconf("SC_CLK_TCK")
FORGET = "truncate ci_job_artifacts, deleted_objects, project_statistics"
ADD_PROJECTS = "insert into project_statistics select project, 1000000 from generate_series(1, %s) as project"
# As in a forge: times, sizes and names of artifacts differ.
ADD = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked,
        created_at, updated_at)
    select 1 + mod(number, %(projects)s), number / 3, 1 + mod(number, 2), 'artifacts.zip',
        left(md5(number::text), 2) || '/' || md5(number::text) || '/@final/' || md5(number::text), number * 37,
        now() - number * interval '1.7 s', 0, now() - number * interval '2.3 s', now() - number * interval '2.1 s'
    from generate_series(1, %(artifacts)s) as number
"""
AUDITED = "select coalesce(sum(cardinality(ids)), 0)::bigint from audit_deletions where run = %s"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 100,000 artifacts; each destroys all of them."""
    numbers = iter(range(1, 1_000_000))
    run = partial(_rate, servers, round(ARTIFACTS * scale), numbers.__next__)
    wall, processor = partial(run, monotonic), partial(run, None)
    return [
        Benchmark("audit", "artifacts/s", partial(wall, "all"), (Peer("AUDIT=off", partial(wall, "off"), 0.9),)),
        Benchmark(
            "audit_people", "artifacts/s", partial(wall, "people"), (Peer("AUDIT=off", partial(wall, "off"), 0.9),)
        ),
        Benchmark(
            "audit_processor",
            "artifacts/s",
            partial(processor, "all"),
            (Peer("AUDIT=off", partial(processor, "off"), 0.9),),
        ),
    ]


def _rate(
    servers: Servers, artifacts: int, number: Callable[[], int], clock: Callable[[], float] | None, audit: str
) -> float:
    """Destroy *artifacts*; return the rate per second of *clock*, or of CPU time if None."""
    with database_of(servers, "audit_cost", audit=audit) as settings:
        _add(artifacts)
        run, clock = number(), clock or _processor
        began = clock()
        destroyed = work_off(settings, run)
        seconds = clock() - began
        (audited,) = database.execute_sql(AUDITED, (run,)).fetchone()
    assert destroyed == artifacts, f"{destroyed} of {artifacts} were destroyed"
    assert audited == (artifacts if audit == "all" else 0), f"{audited} of {artifacts} are in the audit"
    return artifacts / seconds


def _add(artifacts: int) -> None:
    database.execute_sql(FORGET)
    database.execute_sql(ADD_PROJECTS, (PROJECTS,))
    database.execute_sql(ADD, {"projects": PROJECTS, "artifacts": artifacts})
    database.execute_sql("vacuum analyze ci_job_artifacts")
    database.execute_sql("checkpoint")
    client.flushdb()
    FeatureFlag.turn(FLAG, on=True)


def work_off(settings: Settings, run: int, number_of_buckets: int = MAX_BUCKETS) -> int:
    """Work on all buckets in turn, as workers do; return the number of destroyed artifacts."""
    runner = Runner(settings, lambda *_sent: EnqueueCounts(0))
    BucketSet(BUCKETS.name).tidy(client, number_of_buckets, silent_for=settings.bucket_silent_after)
    destroyed, more = 0, True
    while more:
        more = False
        for number in range(number_of_buckets):
            calls = [(f"delete_artifact_bucket:{number}", ())]
            (attempt,) = execute_message(runner, delete_artifact_bucket, calls, run).ended
            assert attempt.error is None, attempt.error
            destroyed += attempt.result_fields()["destroyed"]
            more = more or attempt.wants_successor
    runner.stop()
    return destroyed


def _processor() -> float:
    """Return the CPU seconds of this process and of its PostgreSQL session."""
    session = Path(f"/proc/{database.connection().info.backend_pid}/stat").read_text().rpartition(")")[2].split()
    return process_time() + (int(session[11]) + int(session[12])) / TICK
