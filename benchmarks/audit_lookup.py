"""Queries of an audit of ten million deletions, in rows of a hundred, twenty, ten and one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.api.answers import Subject
from forgekeeper.audit import lookup
from forgekeeper.audit.lookup import PATH_SUBJECT
from forgekeeper.platform.database import database

RECORDS = 10_000_000
SIZES = {"audit_lookup": 100, "audit_lookup_twenties": 20, "audit_lookup_tens": 10, "audit_lookup_ones": 1}
ARTIFACT = Subject("artifact", "ID", "expired_artifact")
QUESTIONS = 5
# As a batch writes them: ids nearly in order, paths in none; long values are stored outside the row.
FILL = """
    insert into audit_deletions (at, batch, record, run, child, phase, ids, hashes, detail)
    select clock_timestamp() - (%(rows)s - chunk) * interval '20 ms', 'expired_job_artifacts', 'expired_artifact',
        chunk / 1000, 'delete_artifact_bucket:' || chunk %% 5, 'done', found.ids, found.hashes,
        jsonb_build_object('path', case when %(size)s = 100 and chunk %% 100 <> 0 then '[]' else found.paths end)
    from generate_series(1, %(rows)s) as chunk, lateral (
        select array_agg(number) as ids, array_agg(('x' || left(md5(path), 8))::bit(32)::integer) as hashes,
            jsonb_agg(path) as paths
        from (select number, 'a/' || number as path
            from generate_series((chunk - 1) * %(size)s + 1::bigint, chunk * %(size)s) as number) as records
    ) as found
"""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times ten million deletions; the target is a second."""
    records = round(RECORDS * scale)
    filled: dict[int, bool] = {}
    return [
        Benchmark(
            name,
            "answers/s",
            partial(_rate, servers, records // size, size, filled),
            (Peer("one a second", lambda: 1.0, 1.0),),
        )
        for name, size in SIZES.items()
    ]


def _rate(servers: Servers, rows: int, size: int, filled: dict[int, bool]) -> float:
    """Ask questions of each kind, for different records; return the worst rate per second."""
    with _filled(servers, rows, size, filled):
        slowest = max(_seconds(question) for question in _questions(rows, size))
    return 1 / slowest


def _questions(rows: int, size: int) -> Iterator[Callable[[], None]]:
    """Yield questions: by id, by path, by run, and for missing records."""
    records = rows * size
    # With rows of a hundred, only one row in a hundred has paths: the others are never read.
    step = max(1, rows // (QUESTIONS + 1) // 100 * 100)
    for chunk in range(step, rows, step):
        number = chunk * size
        yield partial(_found, ARTIFACT, str(number), number)
        yield partial(_found, PATH_SUBJECT, f"a/{number}", number)
    yield partial(_found, ARTIFACT, str(records + 1), None)
    yield partial(_found, PATH_SUBJECT, "b/1", None)
    yield partial(_of_run, rows // 2000, min(1000, rows) * size)


def _seconds(question: Callable[[], None]) -> float:
    began = monotonic()
    question()
    return monotonic() - began


def _found(subject: Subject, asked: str, number: int | None) -> None:
    found = lookup.find_records(subject, asked, None, limit=20)
    assert [one.facts["id"] for one in found] == ([] if number is None else [number]), found


def _of_run(run: int, records: int) -> None:
    lookup.list_newest(None, limit=20, run=run)
    assert sum(one.records for one in lookup.sum_by_state(run)) <= records


@contextmanager
def _filled(servers: Servers, rows: int, size: int, filled: dict[int, bool]) -> Iterator[None]:
    """Connect to a database of its own with *rows* of *size* records."""
    with database_of(servers, f"audit_of_{size}"):
        if size not in filled:
            # A month that has just begun has neither statistics nor a visibility map.
            with database.atomic():
                database.execute_sql("set local statement_timeout = 0")
                database.execute_sql(FILL, {"rows": rows, "size": size})
            filled[size] = True
        yield
