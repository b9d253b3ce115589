"""Bulk imports: of five one has stalled, with two entities of four trackers each; the others are new or finished."""

from __future__ import annotations

from collections.abc import Iterator

from demo.figures import Figure, Results, Sample, SampleData, processed
from forgekeeper.database import database, now
from forgekeeper.settings import Settings
from models import BulkImport, is_stale

ADD = """
    with made as (
        insert into bulk_imports (user_id, status, updated_at)
        select n, case when n %% 5 = 4 then 2 else n %% 2 end,
            clock_timestamp() - case when n %% 5 in (0, 4) then interval '2 days' else interval '1 hour' end
        from generate_series(0, %(total)s - 1) as n
        returning id, status, updated_at
    ), entities as (
        insert into bulk_import_entities
            (bulk_import_id, source_full_path, destination_name, destination_namespace, status, updated_at)
        select id, 'group/sample-' || id, 'sample-' || which, 'imported', status, updated_at
        from made, generate_series(1, 2) as which
        returning id, status, updated_at
    )
    insert into bulk_import_trackers (bulk_import_entity_id, relation, status, updated_at)
    select id, 'relation-' || stage, case when status = 2 then 2 else (array[0, 1, 3, 2])[stage] end, updated_at
    from entities, generate_series(1, 4) as stage
"""


def add_imports(total: int) -> int:
    """Add *total* bulk imports with entities and trackers; return how many have stalled."""
    database.execute_sql(ADD, {"total": total})
    return sum(n % 5 == 0 for n in range(total))


def add(scale: int, _settings: Settings) -> Sample:
    total = 200 * scale
    return Sample("bulk imports", total, add_imports(total))


def count(_settings: Settings) -> Sample:
    return Sample(
        "bulk imports",
        BulkImport.select().count(),
        BulkImport.select().where(is_stale(BulkImport, now())).count(),
        stay=True,
    )


def figures(before: Sample, results: Results) -> Iterator[Figure]:
    yield processed("stale_imports", "bulk_import", before.due)
    yield processed("stale_imports", "entity", sum(result["entities"] for result in results))
    yield processed("stale_imports", "tracker", sum(result["trackers"] for result in results))


SAMPLE_DATA = SampleData(add, count, figures)
