"""The installation: an id that the database, Redis and every root and store have to agree on."""

from __future__ import annotations

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.use import PROCESSES, Use

READ = "select id::text from installation"


class Installation(Base):
    """The installation that this database is of: one row, which the first `migrate` makes."""

    used_by = Use(PROCESSES)

    id = pw.UUIDField(primary_key=True, constraints=default("gen_random_uuid()"))
    made_at = DateTimeTZField(constraints=default("clock_timestamp()"))

    class Meta:
        table_name = "installation"

    @classmethod
    def known(cls) -> str | None:
        """Return the installation's id, None where there is none."""
        row = database.execute_sql(READ).fetchone()
        return row and str(row[0])

    @classmethod
    def ensure(cls) -> str:
        """Return the installation's id; make a new one where there is none.

        Of two that make one at once both return the same.  Whoever has copied a database
        deletes its row: the copy then is another installation, and refused by the places of the first.
        """
        while (row := database.execute_sql(READ).fetchone()) is None:
            database.execute_sql("insert into installation default values on conflict do nothing")
        number: str = row[0]
        return number


Installation.add_index(pw.SQL("create unique index one_installation on installation ((true))"))
