"""Artifacts that were destroyed wrongly: their objects are held back, and their rows come from the audit (batch 11).

There may be millions: PostgreSQL keeps them, we have a page of them at a time, and no transaction is open meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from forgekeeper.audit.intents import at_work
from forgekeeper.database import database
from forgekeeper.database.paged import Paged, paged
from forgekeeper.storage.outbox import DeletedObject
from models import UNLOCKED

RECORD = "expired_artifact"
OBJECT = "deleted_object"
"""What objects of the outbox are called in the audit."""
PAGE = 5_000
"""So many objects are held at once, in a transaction of their own."""
LINES = 5
"""So many rows of the audit are read at once, each of up to some thousands of artifacts."""

COLUMNS = {
    **{name: name for name in ("id", "project_id", "job_id", "partition_id", "file_type", "file_store", "file")},
    "file_final_path": "path",
    "size": "bytes",
    "expire_at": "due",
    "locked": "locked",
    **{name: name for name in ("created_at", "updated_at")},
}
"""The columns of an artifact, and what the audit calls them."""

OF_RUN = "run = %(run)s"
# By so much the clock of an object's row and that of its artifact's line may differ: an hour.
OF_PROJECT = """detail->'project_id' @> to_jsonb(%(project)s::bigint) and at >= (
            select min(created_at) - interval '1 hour' from ci_deleted_objects where project_id = %(project)s
        )"""
# A column of the audit is one value for all, or an array; each is taken apart once.
COLUMN = """case when jsonb_typeof(detail->'{0}') <> 'array' then detail->>'{0}' end as the_{0},
            case when jsonb_typeof(detail->'{0}') = 'array' then detail->'{0}' else '[]' end as all_{0}"""
EACH = """rows from (unnest(ids), jsonb_array_elements_text(all_{0}){1}) with ordinality"""
# Of one that came back in between, what it was last.  Its object is in the outbox by folder and file, as `destroying`
# has put it there.
DESTROYED = f"""
    with lines as materialized (
        select id, at, ids, {COLUMN.format("path")}, {COLUMN.format("project_id")}
        from audit_deletions
        where record = '{RECORD}' and phase in ('done', 'outcome') and {{lines}}
    ), artifacts as (
        select distinct on (one.id) one.id, lines.id as line, place,
            nullif(coalesce(one.path, the_path), '') as path
        from lines, {EACH.format("path", ", jsonb_array_elements_text(all_project_id)")}
            as one (id, path, project_id, place)
        where {{artifacts}}
        order by one.id, lines.id desc
    ), destroyed as (
        select line, place, path, coalesce(folder, '') as folder,
            case when folder = '' then path else last end as file
        from artifacts, lateral (select split_part(path, '/', -1) as last offset 0) as name, lateral (
            select left(path, greatest(0, length(path) - length(last) - 1)) as folder offset 0
        ) as place_of
    )"""
HELD = "pick_up_at = 'infinity'"
NAMED = """
    select distinct object.id from destroyed join ci_deleted_objects as object
        on object.store_dir = folder and object.file = destroyed.file"""
# Where an attempt died between the store and the outbox, the next one closes its intents: the row is there, and held,
# and the object is gone.
GONE = f"""
        select one.id from (
            select ids, {COLUMN.format("state")}
            from audit_deletions
            where record = '{OBJECT}' and phase = 'outcome' and at >= (select min(at) from lines)
        ) as closed, {EACH.format("state", "")} as one (id, state, place)
        where coalesce(one.state, the_state) in ('deleted', 'missing')"""
# The first row has the totals, as every other.
BACK = f""", gone as materialized ({GONE}
    ), present as materialized (
        select distinct store_dir, file from ci_deleted_objects as object
        where {HELD} and not exists (select from gone where gone.id = object.id)
    ), back as (
        select line, place, path is null or present.file is not null as there
        from destroyed left join present on present.store_dir = folder and present.file = destroyed.file
    )
    select line, array_agg(place order by place) filter (where there),
        sum(count(*) filter (where there)) over ()::bigint, sum(count(*) filter (where not there)) over ()::bigint
    from back group by line order by line"""
LINE = "select id, ids, detail from audit_deletions where id = any(%(lines)s) and {which} order by id"


class Which(NamedTuple):
    """Whose artifacts and objects: of a *project*, or of those that a *run* has destroyed; else all objects."""

    project: int | None = None
    run: int | None = None

    @property
    def destroyed(self) -> str:
        """The artifacts, in SQL, as a statement's ``with``."""
        if self.run is not None:
            return DESTROYED.format(lines=OF_RUN, artifacts="true")
        mine = "coalesce(one.project_id, the_project_id)::bigint = %(project)s"
        return DESTROYED.format(lines=OF_PROJECT, artifacts=mine)

    def objects(self, condition: str) -> str:
        """Write a statement for the ids of their objects in the outbox that meet the condition."""
        if self.run is not None:
            return f"{self.destroyed}{NAMED} where {condition}"
        mine = "" if self.project is None else " and project_id = %(project)s"
        return f"select id from ci_deleted_objects where {condition}{mine}"


class Held(NamedTuple):
    """What holding has come to: how many *objects* are held, and the *artifacts* whose rows can come back.

    *lost* counts those whose objects are gone; *too_late* the objects that a run may be deleting just now.
    """

    objects: int
    artifacts: int
    lost: int
    too_late: int
    lines: Paged
    which: Which

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the artifacts by their columns, some at a time; each call begins with the first."""
        statement = LINE.format(which=OF_RUN if self.which.run is not None else "true")
        for page in self.lines.pages(LINES):
            places = {line: there for line, there, *_ in page if there}
            values = {"lines": list(places), "run": self.which.run}
            for line, ids, detail in database.execute_sql(statement, values).fetchall():
                facts = {"locked": UNLOCKED, **detail, "id": list(ids)}
                yield [
                    {column: _value(facts[name], place - 1) for column, name in COLUMNS.items()}
                    for place in places[line]
                ]


def chosen(which: Which) -> AbstractContextManager[Paged]:
    """Choose the objects to be held; nothing is changed."""
    return paged("forgekeeper_objects", f"{which.objects('true')} order by 1", which._asdict())


def held(which: Which) -> AbstractContextManager[Paged]:
    """Choose the objects that are held, to be let go; nothing is changed."""
    return paged("forgekeeper_objects", f"{which.objects(HELD)} order by 1", which._asdict())


@contextmanager
def hold(which: Which, objects: Paged, visibility: timedelta, *, audited: bool) -> Iterator[Held]:
    """Hold back *objects*, each page in a transaction of its own: what is held stays held, whatever comes after.

    A run that has claimed one for *visibility* may be at it.  Where that is *audited* it is known which it is at.
    """
    count = claimed = 0
    for page in objects.pages(PAGE):
        some, of_runs = DeletedObject.hold([number for (number,) in page], visibility=visibility)
        count, claimed = count + some, claimed + of_runs
    # Asked after the last was held: who was before us has committed what it is about to delete.
    going = at_work(OBJECT)
    too_late = sum(number in going for page in objects.pages(PAGE) for (number,) in page)
    with paged("forgekeeper_artifacts", which.destroyed + BACK, which._asdict()) as lines:
        _, _, there, lost = next(lines.pages(1), [(None, None, 0, 0)])[0]
        yield Held(count, there, lost, too_late if audited else max(too_late, claimed), lines, which)


def unhold(objects: Paged, grace: timedelta) -> int:
    """Let go those of *objects* that are held back: due after *grace*; return how many."""
    return sum(DeletedObject.unhold([number for (number,) in page], grace=grace) for page in objects.pages(PAGE))


def _value(column: Sequence[Any] | Any, place: int) -> Any:
    return column[place] if isinstance(column, list) else column
