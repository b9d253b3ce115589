"""Expired artifacts among a million: the cost of destroying them in buckets, in one process and in several.

Ours is the document's child, with its audit. The reference is the algorithm of the document in bare SQL and nothing
else. Its cost grows with the table and with the rows deleted from it. Therefore the table is always complete, and the
reference executes at most `CHUNKS` chunks of a hundred: less than all its work at scales above 0.13; the rest would be
slower than the measured part.

The reference deletes artifacts in the order of their expiry, as ours does, so that no artifact waits for ever if more
expire than are destroyed. Each chunk therefore scans the whole table. A second reference ignores the order and deletes
the first hundred that it finds. It is for information only, because it promises less. From 32 MB (a quarter of the
shared buffers) on, scans of a table start near the end of the previous scan, so it seldom reads deleted rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from statistics import mean
from time import monotonic

import psycopg2
from psycopg2.extensions import cursor

from benchmarks.audit import work_off
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.processes import environment, run, until, workers
from demo.servers import Servers
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.delivery import queues
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.buckets import BucketSet
from workers.expired_job_artifacts import (
    BUCKETS,
    FLAG,
    HIGH_CONCURRENCY_FLAG,
    MAX_BUCKETS,
    MAX_BUCKETS_HIGH_CONCURRENCY,
)

ARTIFACTS = 1_000_000
PROJECTS = 1_000
BATCH_SIZE = 100
CHUNKS = 450
QUEUE = "artifacts"
FORGET = "truncate ci_job_artifacts, deleted_objects, project_statistics"
# As in a forge, neither times nor paths are in the order of creation.
ADD = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked,
        created_at, updated_at)
    select 1 + mod(hash, %(projects)s), number / 3, case when mod(number, 11) = 0 then 3 else 1 + mod(number, 2) end,
        'artifacts.zip', left(path, 2) || '/' || path || '/@final/' || path, mod(hash, 1000003),
        case when mod(number, 5) < 2 then now() - mod(hash, 2592000) * interval '1 s'
             when mod(number, 5) < 4 then now() + interval '1 day' end,
        case when mod(number, 17) < 2 then mod(number, 17) + 1 else 0 end, now() - number * interval '2.3 ms',
        now() - number * interval '2.1 ms'
    from (select number, md5(number::text) as path, abs(hashint8(number)::bigint) as hash
          from generate_series(1, %(artifacts)s) as number) as made
"""
ADD_STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, 1000 + sum(size) from ci_job_artifacts group by project_id
"""
DUE = "expire_at < now() and locked = 0 and file_type <> 3"
COUNTED = f"select count(*), count(*) filter (where {DUE}) from ci_job_artifacts"
RECORDED = "select count(*), count(distinct (store_dir, file)) from deleted_objects"
WRONG = """
    select count(*) from project_statistics left join
        (select project_id, sum(size) as size from ci_job_artifacts group by project_id) as present using (project_id)
    where build_artifacts_size <> 1000 + coalesce(size, 0)
"""
ANY_DUE = f"select exists (select from ci_job_artifacts where {DUE})"
BATCHES = "select extract(epoch from at)::float from audit_deletions where run = %s order by id"

SELECT = f"""
    select id, project_id, size from ci_job_artifacts
    where mod(project_id + job_id, %s) = %s and {DUE}{{order}}
    limit {BATCH_SIZE}
"""
ORDERED, UNORDERED = SELECT.format(order=" order by expire_at"), SELECT.format(order="")
RECORD = """
    insert into deleted_objects (project_id, file_store, store_dir, file, pick_up_at)
    select project_id, file_store, regexp_replace(file_final_path, '/[^/]*$', ''),
        substring(file_final_path from '[^/]*$'), now()
    from ci_job_artifacts where id = any(%s)
"""
DELETE = "delete from ci_job_artifacts where id = any(%s)"
REDUCE = """
    update project_statistics as total set build_artifacts_size = total.build_artifacts_size - gone.size
    from (select project_id, sum(size) as size from unnest(%s, %s::bigint[]) as one (project_id, size) group by 1)
        as gone
    where total.project_id = gone.project_id
"""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 1,000,000 artifacts."""
    artifacts = round(ARTIFACTS * scale)
    numbers = iter(range(1, 1_000_000)).__next__
    here, tenth = partial(_here, servers, artifacts, numbers), partial(_tenth, servers, artifacts, numbers)
    there, reference = partial(_there, servers, artifacts), partial(_reference, servers, artifacts)
    few, many = MAX_BUCKETS, MAX_BUCKETS_HIGH_CONCURRENCY
    bare = Peer("reference in bare SQL", partial(reference, few), 12)
    unordered = Peer("reference without an order", partial(reference, few, select=UNORDERED), 0)
    rate = partial(Benchmark, unit="artifacts/s")
    return [
        rate("artifacts", ours=partial(here, few), peers=(bare, unordered)),
        rate(
            "artifacts_in_ten",
            ours=partial(here, many),
            peers=(Peer("reference in bare SQL", partial(reference, many), 12),),
        ),
        rate("artifacts_worker", ours=partial(there, few, processes=1, threads=1), peers=(bare,)),
        rate(
            "artifacts_two",
            ours=partial(there, few, processes=2, threads=1),
            peers=(Peer("one process", partial(there, few, processes=1, threads=1), 1.6),),
        ),
        rate(
            "artifacts_ten",
            ours=partial(there, many, processes=2, threads=8),
            peers=(Peer("five buckets", partial(there, few, processes=2, threads=8), 1.0),),
        ),
        Benchmark(
            "artifacts_last_tenth",
            "ms/batch",
            partial(tenth, -1),
            (Peer("first tenth", partial(tenth, 0), 1.3),),
            less=True,
        ),
    ]


def _here(servers: Servers, artifacts: int, number: Callable[[], int], buckets: int) -> float:
    """Destroy the expired artifacts in this process, bucket by bucket; return the rate."""
    with _artifacts(servers, artifacts, buckets) as (settings, due):
        began = monotonic()
        destroyed = work_off(settings, number(), buckets)
        seconds = monotonic() - began
        assert destroyed == due, f"{destroyed} of {due} were destroyed"
        _check(artifacts, due, due)
    return due / seconds


def _tenth(servers: Servers, artifacts: int, number: Callable[[], int], which: int) -> float:
    """Destroy the expired artifacts; return the time of a chunk in the first or last tenth.

    It is a mean in milliseconds, by the audit's times.
    """
    with _artifacts(servers, artifacts, MAX_BUCKETS) as (settings, due):
        run = number()
        work_off(settings, run, MAX_BUCKETS)
        _check(artifacts, due, due)
        instants = [row[0] for row in database.execute_sql(BATCHES, (run,)).fetchall()]
    took: list[float] = [later - earlier for earlier, later in pairwise(instants)]
    tenth = max(1, len(took) // 10)
    return mean(took[-tenth:] if which else took[:tenth]) * 1000


def _there(servers: Servers, artifacts: int, buckets: int, *, processes: int, threads: int) -> float:
    """Destroy the expired artifacts in workers, a bucket per thread; return the rate."""
    with (
        _artifacts(servers, artifacts, buckets) as (settings, due),
        workers(environment(settings), processes=processes, threads=threads),
    ):
        began = monotonic()
        run("expired_job_artifacts")
        until(lambda: _quiet() and not database.execute_sql(ANY_DUE).fetchone()[0])
        seconds = monotonic() - began
        _check(artifacts, due, due)
    return due / seconds


def _reference(servers: Servers, artifacts: int, buckets: int, *, select: str = ORDERED) -> float:
    """Run the reference, chunk by chunk and bucket by bucket; return the artifacts per second.

    *select* finds the artifacts that expired first, or any.
    """
    with (
        _artifacts(servers, artifacts, buckets) as (settings, due),
        closing(psycopg2.connect(settings.require_database())) as bare,
        bare.cursor() as cursor,
    ):
        began = monotonic()
        destroyed = sum(_chunks(cursor, select, buckets, number, CHUNKS // buckets) for number in range(buckets))
        seconds = monotonic() - began
        _check(artifacts, destroyed, due)
    return destroyed / seconds


def _chunks(cursor: cursor, select: str, buckets: int, number: int, most: int) -> int:
    destroyed = 0
    for _ in range(most):
        cursor.execute(select, (buckets, number))
        found = cursor.fetchall()
        ids = [row[0] for row in found]
        if ids:
            cursor.execute(RECORD, (ids,))
            cursor.execute(DELETE, (ids,))
            cursor.execute(REDUCE, ([row[1] for row in found], [row[2] for row in found]))
        cursor.connection.commit()
        destroyed += len(ids)
        if len(ids) < BATCH_SIZE:
            break
    return destroyed


@contextmanager
def _artifacts(servers: Servers, artifacts: int, buckets: int) -> Iterator[tuple[Settings, int]]:
    """Connect to a database with *artifacts*; yield its settings and the number due."""
    with database_of(servers, "artifacts", breaker_share=1) as settings:
        database.execute_sql(FORGET)
        database.execute_sql(ADD, {"projects": PROJECTS, "artifacts": artifacts})
        database.execute_sql(ADD_STATISTICS)
        for command in ("vacuum analyze ci_job_artifacts, project_statistics", "checkpoint"):
            database.execute_sql(command)
        client.flushdb()
        FeatureFlag.turn(FLAG, on=True)
        FeatureFlag.turn(HIGH_CONCURRENCY_FLAG, on=buckets == MAX_BUCKETS_HIGH_CONCURRENCY)
        yield settings, database.execute_sql(COUNTED).fetchone()[1]


def _quiet() -> bool:
    return not client.hlen(queues.bodies_key(QUEUE)) and not BucketSet(BUCKETS.name).list_occupied(client)


def _check(artifacts: int, destroyed: int, due: int) -> None:
    """Check the deleted artifacts, their entries in the outbox, and the statistics."""
    for question, answer in (
        (COUNTED, (artifacts - destroyed, due - destroyed)),
        (RECORDED, (destroyed, destroyed)),
        (WRONG, (0,)),
    ):
        found = database.execute_sql(question).fetchone()
        assert found == answer, f"{found} instead of {answer}: {question}"
