"""Projects that hold their artifacts up: somebody else has their statistics locked (batch 11)."""

from __future__ import annotations

from collections.abc import Collection

import peewee as pw
import structlog

from forgekeeper.database import database, sqlstate

LOCK_STATISTICS = "select project_id from project_statistics where project_id = any(%(projects)s) for no key update"
LOCK_NOT_AVAILABLE = "55P03"

log = structlog.get_logger(__name__)


class HeldUp:
    """The projects whose statistics somebody else has locked: they stop nobody, and are not looked at again and again.

    Most are locked for a moment: a class of artifacts is gone through again for those that
    have become free.  The others wait for a later run.
    """

    def __init__(self) -> None:
        self.now: set[int] = set()
        self._left: set[int] = set()

    @property
    def projects(self) -> set[int]:
        """Those to leave out."""
        return self.now | self._left

    def ends(self) -> bool:
        """Wait a little for those that are locked now; say whether one of them is free."""
        if not self.now:
            return False
        left = wait_for(self.now)
        if left:
            log.warning("statistics locked", projects=len(left), first=min(left))
        free, self.now = self.now - left, set()
        self._left |= left
        return bool(free)


def wait_for(projects: Collection[int]) -> set[int]:
    """Wait until nobody has the statistics of *projects* locked; return those that stay locked.

    Nothing is held meanwhile.  The first that is not freed in time ends the waiting: it
    may be one of thousands that one session has locked.
    """
    left = sorted(projects)
    try:
        while left:
            database.execute_sql(LOCK_STATISTICS, {"projects": left[:1]})
            del left[0]
    except pw.OperationalError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
    free = database.execute_sql(f"{LOCK_STATISTICS} skip locked", {"projects": left}).fetchall()
    return set(left).difference(project for (project,) in free)
