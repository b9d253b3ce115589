"""The processes that serve: each says every few seconds that it lives, what it keeps and what it is at.

For eyes alone: nobody's work depends on a row here, and whoever cannot write its own works on.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, Document, default
from forgekeeper.database.grants import BOTH, Use

LONGEST = 1e9
"""Seconds that nothing has been worked on for."""


def _those(found: Any, kind: type) -> list[Any]:
    return [one for one in found if isinstance(one, kind)] if isinstance(found, list) else []


def _timetable(found: Any) -> dict[str, str]:
    return {name: each for name, each in found.items() if isinstance(each, str)} if isinstance(found, dict) else {}


def _is_work(work: dict[str, Any]) -> bool:
    seconds = work.get("seconds")
    texts = isinstance(work.get("what"), str) and isinstance(work.get("message_id"), str)
    return texts and isinstance(seconds, int | float) and 0 <= seconds < LONGEST


class Entry(NamedTuple):
    """A process's own row: its number, and when it entered first."""

    number: int
    started_at: datetime


class Process(Base):
    """A scheduler or a worker process; `silent_from` is when it counts as silent unless it is heard of before.

    `migration` is the newest that its version knows: what it heeds and what it does not goes by that.
    """

    used_by = Use(BOTH, (("insert", (), BOTH), ("update", (), BOTH), ("delete", (), BOTH)))

    id = BigIdentityField()
    kind = pw.TextField()
    host = pw.TextField()
    pid = pw.IntegerField()
    version = pw.TextField()
    migration = pw.TextField(null=True)
    started_at = DateTimeTZField(constraints=default("clock_timestamp()"))
    alive_at = DateTimeTZField()
    silent_from = DateTimeTZField()
    draining = pw.BooleanField(constraints=default("false"))
    queues = Document(lambda found: _those(found, str), null=True)
    timetable = Document(_timetable, null=True)
    at_work = Document(lambda found: [work for work in _those(found, dict) if _is_work(work)], null=True)

    class Meta:
        table_name = "processes"

    @property
    def name(self) -> str:
        """The process as the ledger and the logs name it."""
        return f"{self.host}:{self.pid}"

    def is_silent(self, instant: datetime) -> bool:
        """Say whether nothing has been heard of it at *instant* for as long as it takes to be believed dead."""
        silent: bool = self.silent_from <= instant
        return silent

    @classmethod
    def known(cls) -> list[Process]:
        """Return all that have not ended in an orderly way: those that live, and those that fell silent."""
        return list(cls.select().order_by(cls.kind, cls.host, cls.pid, cls.id))

    @classmethod
    def enrol(
        cls, *, dead_after: timedelta, said: dict[str, Any], started_at: datetime | None = None, **identity: Any
    ) -> Entry:
        """Enter a process, or enter it again as of when it had *started_at*.

        An older one of its name has ended: process ids are used again.  Where that lives after all, as in two
        containers that share a host's name, it enters itself again with its next sign of life, and both stay.
        """
        started = started_at or pw.fn.clock_timestamp()
        same = [getattr(cls, name) == identity[name] for name in ("kind", "host", "pid")]
        cls.delete().where(*same, cls.started_at < started).execute()
        row = cls.insert(**identity, **cls._sign_of_life(dead_after), **said, started_at=started)
        (entered,) = row.returning(cls.id, cls.started_at).tuples().execute()
        return Entry(*entered)

    @classmethod
    def keep_alive(cls, entry: Entry, *, dead_after: timedelta, said: dict[str, Any]) -> bool:
        """Give a sign of life; return False when the row is gone, and the process has to enter itself again."""
        return bool(cls.update(**cls._sign_of_life(dead_after), **said).where(cls.id == entry.number).execute())

    @classmethod
    def withdraw(cls, entry: Entry) -> None:
        """Remove a process that ends in an orderly way."""
        cls.delete().where(cls.id == entry.number).execute()

    @classmethod
    def _sign_of_life(cls, dead_after: timedelta) -> dict[str, Any]:
        instant = pw.fn.clock_timestamp()
        return {"alive_at": instant, "silent_from": instant + dead_after}
