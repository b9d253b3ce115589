"""The outbox: objects of deleted rows, to be deleted later.

The statement that deletes a row inserts its object here, so either both happen or neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.objects import Locations, NamedBy, Objects, Queue, Retry
from forgekeeper.api.row_objects import RowObject
from forgekeeper.platform.database import Base, BigIdentityField, database, default_sql
from forgekeeper.platform.database.naming import quote_name, relation_name
from forgekeeper.platform.database.survey import find_missed_rows
from forgekeeper.platform.settings import Settings

LOCATIONS_BY_FILE_STORE = {1: "artifacts_local", 2: "artifacts"}
"""The location of an object by its row's `file_store`; an object of another number waits for a person."""
MAX_OBJECT_ATTEMPTS = 10
"""Failures after which an object waits for a person."""
INSERT_DELETED_OBJECTS = """
    insert into {table} (project_id, file_store, store_dir, file, pick_up_at)
    -- "/a" must not become "a": that would be another object.
    select {project}, {location}, coalesce(folder, ''), case when folder = '' then {path} else last end,
        %s::timestamptz
    from deleted,
        lateral (select split_part({path}, '/', -1) as last offset 0) as name,
        lateral (
            select left({path}, greatest(0, length({path}) - length(last) - 1)) as folder offset 0
        ) as place
    where {path} <> ''
"""
"""Insert the objects of a chunk's deleted rows.  Rows without a path are left out: no object belongs to them."""

HELD_DUE_TIME: Any = pw.SQL("timestamptz 'infinity'")
# One index lookup for each path: planning a list of a thousand pairs took tens of milliseconds.
SELECT_OBJECTS_AT_PATHS = """
    select place, object.id, object.pick_up_at = 'infinity'
    from unnest(%(folders)s::text[], %(files)s::text[]) with ordinality as asked (folder, file, place), lateral (
        select id, pick_up_at from deleted_objects where store_dir = asked.folder and file = asked.file
    ) as object
"""
# Objects with failed attempts are left out: they may be deleted.  Objects that are due count: they wait for a run, for
# a long time if the batch is held.
FROM_WAITING_OBJECTS = "from deleted_objects where pick_up_at < 'infinity' and attempts = 0"
COUNT_RECOVERABLE_OBJECTS = f"""
    select (select count(*) from (select {FROM_WAITING_OBJECTS} limit %(bound)s) as counted),
        (select pick_up_at {FROM_WAITING_OBJECTS} order by pick_up_at limit 1),
        (select pick_up_at {FROM_WAITING_OBJECTS} order by pick_up_at desc limit 1)
"""
# Held objects are due at 'infinity': no run ever finds them due.
HOLD_OBJECTS = """
    with was as (
        select id, pick_up_at from deleted_objects where id = any(%(ids)s) order by id for no key update
    ), held as (
        update deleted_objects as object set pick_up_at = 'infinity'
        from was where object.id = was.id and was.pick_up_at < 'infinity'
    )
    select count(*), count(*) filter (where pick_up_at <= clock_timestamp() + %(visibility)s) from was
"""
RELEASE_HELD_OBJECTS = """
    update deleted_objects set pick_up_at = clock_timestamp() + %(grace)s
    where pick_up_at = 'infinity' and id = any(%(ids)s)
"""


def split_path(path: str) -> tuple[str, str]:
    """Return the columns `store_dir` and `file` of an object at *path*."""
    folder, _, file = path.rpartition("/")
    return (folder, file) if folder else ("", path)


class DeletedObject(Base):
    """An object to delete; a claim lasts until *pick_up_at*."""

    grants = "worker: select, insert, update, delete; exporter: select"
    location = LOCATIONS_BY_FILE_STORE[2]
    locations: ClassVar[Sequence[str]] = tuple(LOCATIONS_BY_FILE_STORE.values())
    sentence = "the outbox names it"

    id = BigIdentityField()
    project_id = pw.BigIntegerField(null=True)
    file_store = pw.IntegerField(constraints=default_sql("2"))
    store_dir = pw.TextField()
    file = pw.TextField()
    pick_up_at = DateTimeTZField(constraints=default_sql("now()"))
    attempts = pw.SmallIntegerField(constraints=default_sql("0"))
    created_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "deleted_objects"
        indexes = ((("pick_up_at", "id"), False), (("store_dir", "file"), False))

    @property
    def path(self) -> str:
        """The path of the object: the artifact's former ``file_final_path``."""
        return f"{self.store_dir}/{self.file}" if self.store_dir else self.file

    @classmethod
    def find_at_paths(cls, paths: Sequence[str]) -> list[tuple[str, int, bool]]:
        """Return the *paths* that are in the outbox, with the object's id and whether it is held."""
        folders, files = zip(*map(split_path, paths), strict=True) if paths else ((), ())
        values = {"folders": list(folders), "files": list(files)}
        found = database.execute_sql(SELECT_OBJECTS_AT_PATHS, values).fetchall()
        return [(paths[place - 1], number, is_held) for place, number, is_held in found]

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that are in the outbox."""
        return {path for path, *_ in cls.find_at_paths(paths)}

    @classmethod
    def overlooked(cls) -> set[str]:
        """Return the paths of a sample of the outbox that `named` misses."""
        return find_missed_rows("deleted_objects", "id", "concat_ws('/', nullif(store_dir, ''), file)", cls.named)

    @classmethod
    def full_path(cls) -> pw.Node:
        """Return `path` as an expression in SQL."""
        path: pw.Node = pw.fn.concat_ws("/", pw.fn.nullif(cls.store_dir, ""), cls.file)
        return path

    @classmethod
    def count_recoverable(cls, bound: int) -> tuple[int, datetime | None, datetime | None]:
        """Count up to *bound* objects that people can still keep; return first and last due time.

        The times are None if there are no such objects.
        """
        count, first, last = database.execute_sql(COUNT_RECOVERABLE_OBJECTS, {"bound": bound}).fetchone()
        return count, first, last

    @classmethod
    def select_held(cls) -> pw.ModelSelect[DeletedObject]:
        """Select the held objects."""
        return cls.select().where(cls.pick_up_at == HELD_DUE_TIME).order_by(cls.id)

    @classmethod
    def hold(cls, ids: Sequence[int], *, visibility: timedelta) -> tuple[int, int]:
        """Hold objects; return their number, and the number that a run may be deleting.

        A run may be deleting objects that were due, or that it may have claimed for *visibility*.
        """
        values = {"ids": list(ids), "visibility": visibility}
        held, at_work = database.execute_sql(HOLD_OBJECTS, values).fetchone()
        return held, at_work

    @classmethod
    def unhold(cls, ids: Sequence[int], *, grace: timedelta) -> int:
        """Release held objects, due after *grace*; return their number."""
        return int(database.execute_sql(RELEASE_HELD_OBJECTS, {"ids": list(ids), "grace": grace}).rowcount)


class Outbox(RowObject):
    """The outbox gets the object of each deleted row, in the statement that deletes the row.

    *path* is the column of the object's path, *location* the column with the number of its store: 1 is
    ``artifacts_local``, 2 is ``artifacts`` in ``FORGEKEEPER_OBJECT_STORES``.  The object is due
    ``FORGEKEEPER_OBJECT_GRACE`` later; until then people can hold it back, and restore `Rows` that are restorable.  A
    row without a path has no object.

    >>> Outbox(Package.path, location=Package.store)

    Raises `Mistake` for columns that name no object.
    """

    @staticmethod
    def objects(*, unless: NamedBy | None = None) -> Objects[DeletedObject]:
        """Return the objects that are due, for the batch that deletes them; rows of *unless* keep theirs."""
        queue = Queue(
            DeletedObject,
            due_at=DeletedObject.pick_up_at,
            attempts=DeletedObject.attempts,
            created_at=DeletedObject.created_at,
            retry=Retry(first=timedelta(minutes=1), attempts=MAX_OBJECT_ATTEMPTS),
        )
        return Objects(
            queue,
            location=Locations(DeletedObject.file_store, LOCATIONS_BY_FILE_STORE),
            path=DeletedObject.full_path(),
            project=DeletedObject.project_id,
            unless=unless,
            called="object",
        )


def list_outbox_tables(outbox: RowObject) -> list[type[Base]]:
    """Return the tables that may get the objects: ours, and the forge's if it is named."""
    return [DeletedObject] if outbox.theirs is None else [DeletedObject, outbox.theirs]


def write_insert(outbox: RowObject, project: pw.Field[Any] | None, now: datetime, settings: Settings) -> pw.SQL:
    """Return the statement that inserts the objects of the common table ``deleted``.

    The objects are due after the setting `object_grace`.
    """
    theirs = outbox.theirs if settings.objects == "theirs" else None
    names = {
        "table": relation_name(theirs or DeletedObject),
        "project": "null::bigint" if project is None else quote_name(project.column_name),
        "location": quote_name(outbox.location.column_name),
        "path": quote_name(outbox.path.column_name),
    }
    return pw.SQL(INSERT_DELETED_OBJECTS.format(**names), [now + settings.object_grace])
