"""The installation: an id that the database, Redis and every root and store agree on."""

from __future__ import annotations

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default

READ = "select id::text from installation"
INSERT = """
    insert into installation (cluster, database_name, database_oid)
    select system_identifier, datname, oid from pg_control_system(), pg_database where datname = current_database()
    on conflict do nothing
"""


class Installation(Base):
    """The installation that this database belongs to: one row, which the first `migrate` makes."""

    grants = "scheduler: select; worker: select; exporter: select"

    id = pw.UUIDField(primary_key=True, constraints=default("gen_random_uuid()"))
    made_at = DateTimeTZField(constraints=default("clock_timestamp()"))
    cluster = pw.BigIntegerField(null=True)
    database_name = pw.TextField(null=True)
    database_oid = pw.BigIntegerField(null=True)
    audit_keep = pw.IntegerField(null=True)

    class Meta:
        table_name = "installation"

    @classmethod
    def known(cls) -> str | None:
        """Return the installation's id, None where there is none."""
        row = database.execute_sql(READ).fetchone()
        return row and str(row[0])

    @classmethod
    def ensure(cls) -> str:
        """Return the installation's id; make one where there is none, the same for all who do so at once."""
        while (row := database.execute_sql(READ).fetchone()) is None:
            database.execute_sql(INSERT)
        number: str = row[0]
        return number


Installation.add_index(pw.SQL("create unique index one_installation on installation ((true))"))
