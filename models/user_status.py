"""User statuses: an emoji and a message that may clear themselves (batch 48)."""

from __future__ import annotations

from datetime import datetime

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, default
from forgekeeper.database.use import SEEN, WORK, Use


class UserStatus(Base):
    """What users say of themselves, until *clear_status_at*."""

    found_by = ("user_id",)
    used_by = Use(SEEN, (("update", ("user_id",), WORK), ("delete", (), WORK)))

    user_id = pw.BigIntegerField(primary_key=True)
    emoji = pw.TextField(constraints=default("'speech_balloon'"))
    message = pw.CharField(max_length=100, null=True)
    message_html = pw.TextField(null=True)
    availability = pw.SmallIntegerField(constraints=default("0"))
    clear_status_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "user_statuses"

    @classmethod
    def due(cls, now: datetime) -> pw.ModelSelect[UserStatus]:
        """Select the statuses whose time has come, *now* included."""
        return cls.select().where(cls.clear_status_at <= now)


UserStatus.add_index(
    pw.SQL(
        "create index user_statuses_clear_status_at on user_statuses (clear_status_at, user_id)"
        " where clear_status_at is not null"
    )
)
