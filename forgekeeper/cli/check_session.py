"""Findings of `check` on the connection to PostgreSQL: a pooler, and settings that are not in force."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.cli.check_places import Finding, error, ok
from forgekeeper.platform.database import database
from forgekeeper.platform.database.session_settings import TIMEOUT_SETTINGS

POOLED_SENTENCE = "a pooler answers: each transaction applies the settings of its session, no statement is prepared"
LOST_SENTENCE = (
    "{} is {} instead of {}: a pooler or proxy drops the setting; connect to PostgreSQL directly or through PgBouncer"
)


def check_session() -> Iterator[Finding]:
    """Read the settings after the transaction that applied them, and report each lost setting."""
    connection = database.connection()
    if connection.is_pooled:
        yield ok("pooler", POOLED_SENTENCE)
    lost = connection.find_lost_settings()
    for name, (wanted, found) in lost.items():
        yield error("timeouts" if name in TIMEOUT_SETTINGS else "session", LOST_SENTENCE.format(name, found, wanted))
    if not lost:
        yield ok("timeouts", "every time limit of the session is in force")
