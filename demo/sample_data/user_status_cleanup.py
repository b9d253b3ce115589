"""User statuses: of five two have expired, two expire later, one never does."""

from __future__ import annotations

from collections.abc import Iterator

from demo.figures import Figure, Results, Sample, SampleData, processed
from forgekeeper.database import database, now
from forgekeeper.settings import Settings
from models import UserStatus

ADD = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""


def add_statuses(total: int) -> int:
    """Add *total* statuses; return how many of them are due."""
    database.execute_sql(ADD, {"total": total})
    return sum(n % 5 < 2 for n in range(total))


def add(scale: int, _settings: Settings) -> Sample:
    total = 5_000 * scale
    return Sample("user statuses", total, add_statuses(total))


def count(_settings: Settings) -> Sample:
    return Sample(
        "user statuses", UserStatus.select().count(), UserStatus.select().where(UserStatus.is_due(now())).count()
    )


def figures(before: Sample, _results: Results) -> Iterator[Figure]:
    yield processed("user_status_cleanup", "user_status", before.due)
    yield Figure("exporter", "backlog_records", {"batch": "user_status_cleanup", "record": "user_status"}, 0)


SAMPLE_DATA = SampleData(add, count, figures)
