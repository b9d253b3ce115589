"""The backlogs of the last day: nothing records them, so the console asks for them once a minute while it lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime

import peewee as pw
import redis
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.database import database, now, release
from metrics.logs import describe
from metrics.threads import Rounds

MINUTE, DAY = 60.0, 1_440
DRAWN = 96
"""So many points are drawn, each the highest of its time."""

log = structlog.get_logger(__name__)


class Backlogs:
    """How much was due to each batch, minute by minute; None of a minute in which nobody could say."""

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[datetime | None, int | None]]] = {}

    def begin(self) -> None:
        """Look once a minute from now on, in a thread of its own."""
        Rounds("backlogs", self.look, interval=MINUTE).start()

    def look(self) -> None:
        """Look once; servers that are away cost this look, not the thread."""
        try:
            database.connect(reuse_if_open=True)
            instant = now()
            for name, batch in BATCHES.items():
                self._of(name).append((instant, _due(batch, instant)))
        except (pw.PeeweeException, MaxConnectionsExceeded, OSError) as error:
            log.warning("backlogs not known", error=describe(error))
            for name in BATCHES:
                self._of(name).append((None, None))
        finally:
            release()

    def of(self, batch: str) -> tuple[list[int | None], datetime | None]:
        """Return what is known of the batch, thinned out, and since when."""
        known = list(self._of(batch))
        since = next((instant for instant, _ in known if instant), None)
        return _thinned([count for _, count in known]), since

    def _of(self, batch: str) -> deque[tuple[datetime | None, int | None]]:
        return self._known.setdefault(batch, deque(maxlen=DAY))


def _due(batch: BatchSpec, instant: datetime) -> int | None:
    try:
        due = batch.due(instant)
    except redis.RedisError:
        return None
    return due and due.records


def _thinned(counts: Sequence[int | None]) -> list[int | None]:
    size = -(-len(counts) // DRAWN) or 1
    parts = ([one for one in counts[at : at + size] if one is not None] for at in range(0, len(counts), size))
    return [max(part, default=None) for part in parts]


BACKLOGS = Backlogs()
