"""Backlogs of the last day, read once a minute, because nothing records them."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime

import peewee as pw
import redis
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.database import database, now, release_connection
from forgekeeper.platform.database.read_only import ReadOnlyViolation
from metrics.logs import describe_error
from metrics.threads import PeriodicThread

READ_INTERVAL_SECONDS, MAX_KEPT_MINUTES = 60.0, 1_440
MAX_CHART_POINTS = 48
"""Maximum points of a chart."""
BacklogPoint = tuple[datetime | None, int | None]

log = structlog.get_logger(__name__)


class BacklogHistory:
    """Due records of each batch by minute; None for a minute without an answer."""

    def __init__(self) -> None:
        self._points: dict[str, deque[BacklogPoint]] = defaultdict(lambda: deque(maxlen=MAX_KEPT_MINUTES))

    def start_reading(self) -> None:
        """Start a thread that reads the backlogs once a minute."""
        PeriodicThread("backlogs", self.read_backlogs, interval=READ_INTERVAL_SECONDS).start()

    def read_backlogs(self) -> None:
        """Read the backlogs once; errors of servers do not end the thread."""
        try:
            database.connect(reuse_if_open=True)
            instant = now()
            for name, batch in BATCHES.items():
                try:
                    due = batch.sum_backlogs(instant)
                except (redis.RedisError, pw.ProgrammingError, ReadOnlyViolation):
                    # The backlog of a blocked batch is unknown, for example because the forge lacks a table.
                    due = None
                self._points[name].append((instant, due and due.records))
        except (pw.PeeweeException, MaxConnectionsExceeded, OSError) as error:
            log.warning("backlogs unknown", error=describe_error(error))
            for name in BATCHES:
                self._points[name].append((None, None))
        finally:
            release_connection()

    def chart_points(self, batch: str) -> list[BacklogPoint]:
        """Return at most `MAX_CHART_POINTS` points: the last time and highest count of each part.

        Both are None for a time without an answer.
        """
        known = list(self._points[batch])
        size = -(-len(known) // MAX_CHART_POINTS) or 1
        parts = (known[at : at + size] for at in range(0, len(known), size))
        return [(part[-1][0], max((count for _, count in part if count is not None), default=None)) for part in parts]


BACKLOG_HISTORY = BacklogHistory()
