"""The outbox: objects whose artifacts are gone and that must go too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, database, default, exclusions
from forgekeeper.database.queries import chosen
from forgekeeper.database.survey import missed

LOCATIONS = {1: "artifacts_local", 2: "artifacts"}
"""Where an object lies, by its row's `file_store`; one of another number waits for a person."""
MAX_ATTEMPTS = 10
"""After so many failures an object waits for a person."""

FOR_EVER: Any = pw.SQL("timestamptz 'infinity'")
OURS = "(id, pick_up_at) in (select * from unnest(%(ids)s::bigint[], %(claims)s::timestamptz[]))"
"""A claim sets the instant at which the object is due again: while that stands there, the claim is ours."""

CLAIM_DUE = """
    update deleted_objects set pick_up_at = clock_timestamp() + %(visibility)s
    where id = any(array(
        select id from deleted_objects
        where pick_up_at <= %(now)s and attempts < %(max_attempts)s and file_store = any(%(stores)s)
          and ({excluded}) is not true{chosen}
        order by pick_up_at, id
        limit %(limit)s
        for update skip locked
    ))
    returning {columns}
"""
# A look into the index for each: planning a list of a thousand pairs took tens of milliseconds.
LYING = """
    select asked.path, object.id, object.pick_up_at = 'infinity'
    from unnest(%(folders)s::text[], %(files)s::text[], %(paths)s::text[]) as asked (folder, file, path), lateral (
        select id, pick_up_at from deleted_objects where store_dir = asked.folder and file = asked.file
    ) as object
"""
# What a run has failed to delete may be gone.  What is due waits for a run, for long if the batch is held.
WAITING = "from deleted_objects where pick_up_at < 'infinity' and attempts = 0"
RECOVERABLE = f"""
    select (select count(*) from (select {WAITING} limit %(bound)s) as counted),
        (select pick_up_at {WAITING} order by pick_up_at limit 1),
        (select pick_up_at {WAITING} order by pick_up_at desc limit 1)
"""
STILL_CLAIMED = f"select id from deleted_objects where {OURS}"
# Locked, so that a person who holds objects back comes before us, or waits until it is known that we delete them.
# Rows that another session has locked are waited for: a second claim locks ours until it ends, if it found them due
# before our claim ended.  All sessions lock in the order of the ids, so none waits for another in a circle.
STILL_OURS = f"select id from deleted_objects where {OURS} order by id for no key update"
FAIL = f"""
    update deleted_objects set attempts = attempts + 1,
        pick_up_at = clock_timestamp() + %(first)s * power(2, least(attempts, 10))
    where {OURS} returning attempts >= %(max_attempts)s
"""
FORGET = """
    delete from deleted_objects
    where (id, store_dir, file) in (select * from unnest(%(id)s::bigint[], %(store_dir)s::text[], %(file)s::text[]))
"""
FORGET_PATHS = """
    delete from deleted_objects
    where id = any(%(ids)s) and (id, concat_ws('/', nullif(store_dir, ''), file))
        in (select * from unnest(%(ids)s::bigint[], %(paths)s::text[]))
    returning id
"""
# The last instant there is: no run ever finds it due.
HOLD = """
    with was as (
        select id, pick_up_at from deleted_objects where id = any(%(ids)s) order by id for no key update
    ), held as (
        update deleted_objects as object set pick_up_at = 'infinity'
        from was where object.id = was.id and was.pick_up_at < 'infinity'
    )
    select count(*), count(*) filter (where pick_up_at <= clock_timestamp() + %(visibility)s) from was
"""
UNHOLD = """
    update deleted_objects set pick_up_at = clock_timestamp() + %(grace)s
    where pick_up_at = 'infinity' and id = any(%(ids)s)
"""
PUT_BACK = f"update deleted_objects set pick_up_at = %(now)s where {OURS}"


def parted(path: str) -> tuple[str, str]:
    """Return the folder and the file that an object at *path* has in the outbox."""
    folder, _, file = path.rpartition("/")
    return (folder, file) if folder else ("", path)


class DeletedObject(Base):
    """An object to delete; who has claimed it has it until *pick_up_at*."""

    grants = "worker: select, insert, update, delete; exporter: select"
    location = LOCATIONS[2]
    locations: ClassVar[Sequence[str]] = tuple(LOCATIONS.values())
    sentence = "the outbox names it"

    id = BigIdentityField()
    project_id = pw.BigIntegerField(null=True)
    file_store = pw.IntegerField(constraints=default("2"))
    store_dir = pw.TextField()
    file = pw.TextField()
    pick_up_at = DateTimeTZField(constraints=default("now()"))
    attempts = pw.SmallIntegerField(constraints=default("0"))
    created_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "deleted_objects"
        indexes = ((("pick_up_at", "id"), False), (("store_dir", "file"), False))

    @property
    def path(self) -> str:
        """Where the object lies: what was the artifact's ``file_final_path``."""
        return f"{self.store_dir}/{self.file}" if self.store_dir else self.file

    @property
    def lies_at(self) -> str | None:
        """The location of its store."""
        return LOCATIONS.get(self.file_store)

    @classmethod
    def lying(cls, paths: Sequence[str]) -> list[tuple[str, int, bool]]:
        """Return those of *paths* that lie in the outbox, with the object's id and whether it is held."""
        folders, files = zip(*map(parted, paths), strict=True) if paths else ((), ())
        values = {"folders": list(folders), "files": list(files), "paths": list(paths)}
        found: list[tuple[str, int, bool]] = database.execute_sql(LYING, values).fetchall()
        return found

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that lie in the outbox."""
        return {path for path, *_ in cls.lying(paths)}

    @classmethod
    def overlooked(cls) -> set[str]:
        """Return the paths of some objects in the outbox that `named` misses."""
        return missed("deleted_objects", "id", "concat_ws('/', nullif(store_dir, ''), file)", cls.named)

    @classmethod
    def excluded(cls, batch: str | None) -> pw.Node:
        """Return the condition of the objects that people exclude of the *batch*, or of any where that is None."""
        path = pw.fn.concat_ws("/", pw.fn.nullif(cls.store_dir, ""), cls.file)
        return exclusions.excluded(batch, project=cls.project_id, name=path)

    @classmethod
    def due(cls, now: datetime) -> pw.ModelSelect[DeletedObject]:
        """Select the objects to delete now."""
        return cls.select().where(cls.pick_up_at <= now, cls.attempts < MAX_ATTEMPTS)

    @classmethod
    def later(cls, now: datetime) -> pw.ModelSelect[DeletedObject]:
        """Select the objects that are to be deleted, but not yet."""
        return cls.select().where(cls.pick_up_at > now, cls.attempts < MAX_ATTEMPTS)

    @classmethod
    def recoverable(cls, bound: int) -> tuple[int, datetime | None, datetime | None]:
        """Say how many objects, at most *bound*, a person can still keep, and when the first and the last are due."""
        count, first, last = database.execute_sql(RECOVERABLE, {"bound": bound}).fetchone()
        return count, first, last

    @classmethod
    def dead(cls) -> pw.ModelSelect[DeletedObject]:
        """Select the objects that were given up."""
        return cls.select().where(cls.attempts >= MAX_ATTEMPTS).order_by(cls.id)

    @classmethod
    def claim_due(
        cls,
        now: datetime,
        *,
        stores: Collection[int] = tuple(LOCATIONS),
        visibility: timedelta,
        limit: int,
        only: Sequence[int] | None = None,
        without: Collection[int] = (),
        batch: str | None = None,
    ) -> list[DeletedObject]:
        """Claim up to *limit* due objects of these *stores*; if we die, others find them due after *visibility*.

        What people exclude of the *batch*, or of any where that is None, is left as it is.
        """
        values: dict[str, Any] = {"visibility": visibility, "only": only, "without": list(without)}
        values |= {"stores": list(stores)}
        values |= {"now": now, "limit": limit, "max_attempts": MAX_ATTEMPTS}
        columns = ("id", "file_store", "store_dir", "file", "pick_up_at", "project_id", "created_at")
        statement = CLAIM_DUE.format(
            excluded=exclusions.written(cls, cls.excluded(batch)),
            chosen=chosen("id", only=only, without=without),
            columns=", ".join(columns),
        )
        rows = database.execute_sql(statement, values).fetchall()
        return [cls(**dict(zip(columns, row, strict=True))) for row in rows]

    @classmethod
    def forget(cls, claimed: Sequence[DeletedObject]) -> int:
        """Remove the rows of objects that are gone; return how many there were.

        By their objects, too: in a database that came back older another's row may have the id.
        """
        values = {name: [getattr(row, name) for row in claimed] for name in ("id", "store_dir", "file")}
        return int(database.execute_sql(FORGET, values).rowcount)

    @classmethod
    def forget_paths(cls, paths: Mapping[int, str]) -> set[int]:
        """Remove the rows of these ids that name these paths; return the ids of those that were there."""
        values = {"ids": list(paths), "paths": list(paths.values())}
        return {number for (number,) in database.execute_sql(FORGET_PATHS, values).fetchall()}

    @classmethod
    def still_ours(cls, claimed: Sequence[DeletedObject]) -> set[int]:
        """Return the ids of the objects that are still claimed by us, and lock them until the transaction ends."""
        return {number for (number,) in database.execute_sql(STILL_OURS, _claims(claimed)).fetchall()}

    @classmethod
    def still_claimed(cls, claimed: Sequence[DeletedObject]) -> set[int]:
        """Return the ids of those that no other has claimed since; nothing is locked."""
        return {number for (number,) in database.execute_sql(STILL_CLAIMED, _claims(claimed)).fetchall()}

    @classmethod
    def put_back(cls, claimed: Sequence[DeletedObject], now: datetime) -> None:
        """Let the objects that are still ours be due again as they were; no attempt is spent."""
        database.execute_sql(PUT_BACK, {**_claims(claimed), "now": now})

    @classmethod
    def fail(cls, claimed: Sequence[DeletedObject], *, first_retry: timedelta) -> int:
        """Spend an attempt on each and let it wait, twice as long each time; return how many died of it."""
        values = {**_claims(claimed), "first": first_retry, "max_attempts": MAX_ATTEMPTS}
        return sum(died for (died,) in database.execute_sql(FAIL, values).fetchall())

    @classmethod
    def held(cls) -> pw.ModelSelect[DeletedObject]:
        """Select the objects that are held back."""
        return cls.select().where(cls.pick_up_at == FOR_EVER).order_by(cls.id)

    @classmethod
    def hold(cls, ids: Sequence[int], *, visibility: timedelta) -> tuple[int, int]:
        """Hold objects back; return how many are held now, and how many of them a run may be deleting.

        Those are the ones that were due, or that a run may have claimed for *visibility*.
        """
        values = {"ids": list(ids), "visibility": visibility}
        held, at_work = database.execute_sql(HOLD, values).fetchone()
        return held, at_work

    @classmethod
    def unhold(cls, ids: Sequence[int], *, grace: timedelta) -> int:
        """Let held objects go, due after *grace*; return how many there were."""
        return int(database.execute_sql(UNHOLD, {"ids": list(ids), "grace": grace}).rowcount)

    @classmethod
    def retry(cls, ids: Sequence[int] | None) -> int:
        """Let dead objects be tried again, all of them if *ids* is None; return how many.  What is held stays held."""
        values = {"attempts": 0, "pick_up_at": pw.fn.clock_timestamp()}
        return int(cls.update(values).where(cls._given_up(ids)).execute())

    @classmethod
    def discard(cls, ids: Sequence[int] | None) -> int:
        """Forget dead objects, all of them if *ids* is None; return how many.  They stay in their store for good."""
        return int(cls.delete().where(cls._given_up(ids)).execute())

    @classmethod
    def _given_up(cls, ids: Sequence[int] | None) -> pw.Expression:
        which: pw.Expression = (cls.attempts >= MAX_ATTEMPTS) & (cls.pick_up_at < FOR_EVER)
        return which if ids is None else which & cls.id.in_(list(ids))


def _claims(claimed: Sequence[DeletedObject]) -> dict[str, Any]:
    return {"ids": [row.id for row in claimed], "claims": [row.pick_up_at for row in claimed]}
