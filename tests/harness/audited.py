"""Read the audit record by record."""

from contextlib import contextmanager

import pytest

from forgekeeper.audit.deletions import Deletion, _split_into_rows
from forgekeeper.platform.database import database
from forgekeeper.platform.failpoints import FailpointReached, Failpoints, Fault, arm_failpoints

UNCLOSED = """
    select count(*) from audit_deletions as intended
    where phase = 'intent' and not exists (select from audit_deletions as closing where closing.intent = intended.id)
"""


def list_audit_lines(record, *phases):
    """Return the audited facts of each record of the kind, in order; by default of the phases with an outcome."""
    phases = phases or ("done", "outcome")
    rows = Deletion.select().where(Deletion.record == record, Deletion.phase.in_(phases)).order_by(Deletion.id)
    return [line for row in rows for line in _items(row)]


def list_audited_deletions(record, name):
    """Return the values of the column *name* of the records that the audit lists as deleted or missing."""
    return {line[name] for line in list_audit_lines(record) if line.get("state", "deleted") in ("deleted", "missing")}


def record_intent(audit, record, *, ids, names=(), scope=None, **columns):
    """Record an intent, as an attempt does before its deletion; return the ids of its rows."""
    return audit.insert_rows("intent", record, _split_into_rows(ids, names, columns), scope=scope)


def count_open_intents():
    """Count the intents without outcome."""
    return database.execute_sql(UNCLOSED).fetchone()[0]


@contextmanager
def interrupted_at(step):
    """Interrupt the block at the failpoint *step*, as a crash does."""
    arm_failpoints(Failpoints({step: Fault("raise")}))
    try:
        with pytest.raises(FailpointReached):
            yield
    finally:
        arm_failpoints(Failpoints())


def _items(row):
    size = max(len(row.ids), len(row.hashes))
    for place in range(size):
        facts = {"id": row.ids[place]} if row.ids else {}
        yield facts | {key: value[place] if isinstance(value, list) else value for key, value in row.detail.items()}
