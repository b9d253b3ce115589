"""Feature flags: switches that operators turn at run time."""

from __future__ import annotations

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, default

FLAGS: dict[str, str] = {}
"""Every flag that a batch declares, and what it switches; one that has no row is off."""


class FeatureFlag(Base):
    """A flag that somebody has turned at least once."""

    grants = "person: insert, update; worker: select; exporter: select"

    name = pw.TextField(primary_key=True)
    enabled = pw.BooleanField(constraints=default("false"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "feature_flags"

    @classmethod
    def is_on(cls, name: str) -> bool:
        """Say whether the flag is on; one that was never turned is off."""
        return cls.select().where(cls.name == name, cls.enabled).exists()

    @classmethod
    def turn(cls, name: str, *, on: bool) -> bool:
        """Turn a flag on or off for every process, from its next look on; return whether it was on."""
        now = pw.fn.clock_timestamp()
        # Locked, it is not turned between this look and what follows.
        was_on: bool = cls.select(cls.enabled).where(cls.name == name).for_update().scalar() or False
        cls.insert(name=name, enabled=on, updated_at=now).on_conflict(
            conflict_target=[cls.name], update={cls.enabled: on, cls.updated_at: now}
        ).execute()
        return was_on
