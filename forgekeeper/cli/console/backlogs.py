"""The backlogs of the last day: nothing records them, so the console asks for them once a minute while it lives."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime

import peewee as pw
import redis
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.database import database, now, release
from forgekeeper.platform.database.looking import WritesInLook
from metrics.logs import describe
from metrics.threads import Rounds

MINUTE, DAY = 60.0, 1_440
MAX_POINTS = 48
"""Limit of the points that a chart shows."""
Point = tuple[datetime | None, int | None]

log = structlog.get_logger(__name__)


class Backlogs:
    """The records due to each batch, minute by minute; None for a minute without an answer."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=DAY))

    def begin(self) -> None:
        """Look once a minute from now on, in a thread of its own."""
        Rounds("backlogs", self.look, interval=MINUTE).start()

    def look(self) -> None:
        """Look once; servers that are away cost this look, not the thread."""
        try:
            database.connect(reuse_if_open=True)
            instant = now()
            for name, batch in BATCHES.items():
                try:
                    due = batch.due(instant)
                except (redis.RedisError, pw.ProgrammingError, WritesInLook):
                    # Of a batch that is blocked, as the forge lacks a table, say, nobody knows it.
                    due = None
                self._known[name].append((instant, due and due.records))
        except (pw.PeeweeException, MaxConnectionsExceeded, OSError) as error:
            log.warning("backlogs not known", error=describe(error))
            for name in BATCHES:
                self._known[name].append((None, None))
        finally:
            release()

    def points(self, batch: str) -> list[Point]:
        """Return at most `MAX_POINTS` of what is known of the batch: the highest count of each part, and its last time.

        Both are None for a time without an answer.
        """
        known = list(self._known[batch])
        size = -(-len(known) // MAX_POINTS) or 1
        parts = (known[at : at + size] for at in range(0, len(known), size))
        return [(part[-1][0], max((count for _, count in part if count is not None), default=None)) for part in parts]


BACKLOGS = Backlogs()
