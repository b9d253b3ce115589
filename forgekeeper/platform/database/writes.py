"""Checks whether PostgreSQL accepts writes.

A standby, a read-only server and a server that is short of transaction ids refuse them.
"""

from __future__ import annotations

import peewee as pw

from forgekeeper.platform.database import database
from metrics.logs import clean_text

SELECT_SERVER_STATE = "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean"
# This assigns a transaction id, even in a read-only transaction.  A server close to wraparound refuses that.
SELECT_TRANSACTION_ID = "select pg_current_xact_id()"


def why_refused(*, prove: bool) -> str | None:
    """Return a sentence why PostgreSQL refuses writes, None if no reason is found.

    With *prove* it also takes a transaction id; checks that are repeated twice a second should not.  Needs a
    connection.  Raises PostgreSQL's errors if it does not answer.
    """
    standby, read_only = database.execute_sql(SELECT_SERVER_STATE).fetchone()
    if standby:
        return "it is a standby and accepts no writes: point FORGEKEEPER_DATABASE_URL at the primary"
    if read_only:
        return (
            "default_transaction_read_only is on, so it accepts no writes: turn it off for the server, the database or"
            " the role, for example with `alter role ... set default_transaction_read_only = off`"
        )
    if not prove:
        return None
    try:
        with database.atomic():
            database.execute_sql(SELECT_TRANSACTION_ID)
    except pw.DatabaseError as error:
        return f"it accepts no writes: {clean_text(str(error).strip().splitlines()[0])}"
    return None
