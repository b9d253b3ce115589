"""Changes by batches that users have to hear of: an outbox for a program that sends mails."""

from __future__ import annotations

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.database import Base, BigIdentityField, Document, default_sql


class Notice(Base):
    """A *record* that a batch has changed, by its *key*.

    It is written with the change, and its reader deletes it.
    """

    grants = "worker: select, update (id), insert, delete"

    id = BigIdentityField()
    batch = pw.TextField()
    record = pw.TextField()
    key = pw.TextField()
    detail = Document(dict)
    at = DateTimeTZField(constraints=default_sql("clock_timestamp()"), index=True)

    class Meta:
        table_name = "notices"
