"""Backlogs of the last day, read once a minute, because nothing records them."""

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
"""Maximum points of a chart."""
Point = tuple[datetime | None, int | None]

log = structlog.get_logger(__name__)


class Backlogs:
    """Due records of each batch by minute; None for a minute without an answer."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=DAY))

    def begin(self) -> None:
        """Start a thread that reads the backlogs once a minute."""
        Rounds("backlogs", self.look, interval=MINUTE).start()

    def look(self) -> None:
        """Read the backlogs once; errors of servers do not end the thread."""
        try:
            database.connect(reuse_if_open=True)
            instant = now()
            for name, batch in BATCHES.items():
                try:
                    due = batch.due(instant)
                except (redis.RedisError, pw.ProgrammingError, WritesInLook):
                    # The backlog of a blocked batch is unknown, for example because the forge lacks a table.
                    due = None
                self._known[name].append((instant, due and due.records))
        except (pw.PeeweeException, MaxConnectionsExceeded, OSError) as error:
            log.warning("backlogs not known", error=describe(error))
            for name in BATCHES:
                self._known[name].append((None, None))
        finally:
            release()

    def points(self, batch: str) -> list[Point]:
        """Return at most `MAX_POINTS` points: the last time and highest count of each part.

        Both are None for a time without an answer.
        """
        known = list(self._known[batch])
        size = -(-len(known) // MAX_POINTS) or 1
        parts = (known[at : at + size] for at in range(0, len(known), size))
        return [(part[-1][0], max((count for _, count in part if count is not None), default=None)) for part in parts]


BACKLOGS = Backlogs()
