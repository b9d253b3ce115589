"""Whether PostgreSQL takes writes: a standby does not, nor a server that is read-only or short of transaction ids."""

from __future__ import annotations

import peewee as pw

from forgekeeper.platform.database import database
from metrics.logs import clean

SERVER = "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean"
# It takes a transaction id, which a server that must not wrap around refuses, also in a transaction that only reads.
TAKE_ID = "select pg_current_xact_id()"


def why_refused(*, prove: bool) -> str | None:
    """Return in a sentence why PostgreSQL takes no writes, or None if it takes them, as far as is known.

    To *prove* it takes a transaction id, which a look that is repeated twice a second should not.  Needs a connection;
    raises the errors of PostgreSQL if it cannot be asked.
    """
    standby, read_only = database.execute_sql(SERVER).fetchone()
    if standby:
        return "it is a standby and takes no writes: point FORGEKEEPER_DATABASE_URL at the primary"
    if read_only:
        return (
            "default_transaction_read_only is on, so it takes no writes: turn it off for the server, the database or"
            " the role, as with `alter role ... set default_transaction_read_only = off`"
        )
    if not prove:
        return None
    try:
        with database.atomic():
            database.execute_sql(TAKE_ID)
    except pw.DatabaseError as error:
        return f"it takes no writes: {clean(str(error).strip().splitlines()[0])}"
    return None
