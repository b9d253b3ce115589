"""Delete pipelines that nothing has touched for a year: a batch from outside the project."""

from __future__ import annotations

from datetime import datetime, timedelta

from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch


class Pipeline(Table):
    """A run of a project's CI."""

    updated_at = DateTimeTZField()

    class Meta:
        table_name = "pipelines"


@batch(cron="*/10 * * * *", budget=timedelta(minutes=1))
def stale_pipelines(now: datetime) -> Rows[Pipeline]:
    """Delete pipelines that nothing has touched for a year."""
    return Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))
