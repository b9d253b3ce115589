"""Sample data of batch 48: user statuses, some of them due."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.brought import Figure, Results, Sample, processed
from forgekeeper.database import database, now
from forgekeeper.settings import Settings
from models import UserStatus
from workers.user_status_cleanup import user_status_cleanup

# Of five statuses two have expired, two expire later, one never does.
ADD = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""


def add(total: int) -> int:
    """Add *total* statuses; return how many of them are due."""
    database.execute_sql(ADD, {"total": total})
    return sum(n % 5 < 2 for n in range(total))


@user_status_cleanup.sample
def add_sample(scale: int, _settings: Settings) -> Sample:
    """Add user statuses, some of them due."""
    total = 5_000 * scale
    return Sample("user statuses", total, add(total))


@user_status_cleanup.present
def present(_settings: Settings) -> Sample:
    """Count what there is, and what is due."""
    return Sample("user statuses", UserStatus.select().count(), UserStatus.due(now()).count())


@user_status_cleanup.proof
def proof(before: Sample, _results: Results) -> Iterator[Figure]:
    """Say what the pages of metrics show of it."""
    yield processed("user_status_cleanup", "user_status", before.due)
    yield Figure("exporter", "backlog_records", {"batch": "user_status_cleanup", "record": "user_status"}, 0)
