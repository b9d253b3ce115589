"""What people keep batches from deleting beforehand: a project, a group's projects, or whatever a pattern matches.

An exclusion is a part of the condition by which records go.  The statement that deletes a chunk asks for it itself, so
one that is added while a run works counts from the next chunk on.  What lies outside the database is held against the
same condition, once a chunk.  A record without a project, or a name, is in no exclusion of projects, or patterns.

Which projects a group has only the forge knows: a relation of its says so, where there is one (`groups`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.database import Base, BigIdentityField, database, default
from forgekeeper.platform.database.naming import quote_name, relation_name, shown_name, write_expression
from forgekeeper.platform.database.survey import literal
from metrics.logs import one_line

Kind = Literal["project", "group", "pattern"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REASON = "excluded"
"""Why a record stays."""
SHOWN = 10
"""So many exclusions are named."""
STANDS = "(until is null or until > clock_timestamp())"
OF_BATCH = f"from exclusions where {STANDS} and coalesce(batch = %s, true)"
"""Those of all batches and of one; where nobody knows which one, of each."""
MEANS_SOMETHING = """
    case kind when 'project' then number is not null when 'group' then number is not null
        when 'pattern' then alike is not null else false end
"""
"""What SQL writes there excludes something, too."""
NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
MEANT = re.compile(r"[\\%_]")
VISIBLE = "select to_regclass(%s) is not null"
ASKED = "select place from unnest(%s::bigint[], %s::text[]) with ordinality as one (project, name, place) where "


class Unclear(ValueError):
    """What is to be excluded is not written as an exclusion is; the message is a sentence that says how."""


class Subject(NamedTuple):
    """What is excluded: a number of a *project* or *group*, or what names are *alike* that a *pattern* matches."""

    kind: Kind
    subject: str
    number: int | None = None
    alike: str | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """Read it as people write it; raise `Unclear` for what could exclude nothing."""
        kind, _, subject = text.partition(":")
        if kind not in KINDS or not subject:
            raise Unclear(f"{text!r} is nothing to exclude: write project:7, group:9 or 'pattern:uploads/*'")
        if kind != "pattern" and not NUMBER.fullmatch(subject):
            raise Unclear(f"{subject!r} is no number of a {kind}: write {kind}:7")
        if kind != "pattern":
            return cls(cast("Kind", kind), str(int(subject)), number=int(subject))
        if "\0" in subject:
            raise Unclear("a pattern has no NUL: no name has one")
        return cls("pattern", subject, alike=MEANT.sub(r"\\\g<0>", subject).replace("*", "%").replace("?", "_"))


class Exclusion(Base):
    """What a person excludes: *subject* as it was written, of all batches or of one, until it ends or is removed."""

    grants = "person: select, insert, delete; worker: select, update (until), delete; exporter: select"

    id = BigIdentityField()
    kind = pw.TextField()
    subject = pw.TextField()
    number = pw.BigIntegerField(null=True)
    alike = pw.TextField(null=True)
    batch = pw.TextField(null=True)
    reason = pw.TextField()
    by = pw.TextField()
    since = DateTimeTZField(constraints=default("clock_timestamp()"))
    until = DateTimeTZField(null=True)

    class Meta:
        table_name = "exclusions"
        constraints = [pw.Check(MEANS_SOMETHING, name="exclusions_kind")]  # noqa: RUF012

    @property
    def what(self) -> str:
        """What is excluded, as a person writes it."""
        return f"{self.kind}:{self.subject}"

    @classmethod
    def add(
        cls, what: Subject, *, batch: str | None, reason: str, by: str, since: datetime, until: datetime | None
    ) -> Exclusion:
        """Exclude it beside what others do; return the exclusion."""
        facts = {"batch": batch, "reason": one_line(reason), "by": one_line(by), "since": since, "until": until}
        made: Exclusion = cls.create(**what._asdict(), **facts)
        return made

    @classmethod
    def standing(cls, batch: str | None = None) -> list[Exclusion]:
        """Return what is excluded at this moment, the oldest first: of anything, or of a batch."""
        query = cls.select().where(pw.SQL(STANDS)).order_by(cls.id)
        return list(query if batch is None else query.where(cls.batch.is_null() | (cls.batch == batch)))

    def sentence(self) -> str:
        """Say who excludes what, of which batch, until when and why."""
        of = f" of {self.batch}" if self.batch else ""
        until = f" until {_moment(self.until)}" if self.until else ""
        return f"{self.what} is excluded{of}{until} by {self.by} since {_moment(self.since)} ({self.reason})"


class Groups(NamedTuple):
    """The relation of the forge that says which projects a group has: a row for each project and each of its groups."""

    project: pw.Field[Any]
    group: pw.Field[Any]

    @property
    def model(self) -> type[Base]:
        """The relation."""
        model: type[Base] = self.project.model
        return model

    @property
    def said(self) -> str:
        """The relation as SQL calls it, with its columns."""
        return f"{shown_name(self.model)} ({self.project.column_name}, {self.group.column_name})"


_groups: list[Groups] = []


def groups(project: pw.Field[Any], group: pw.Field[Any]) -> None:
    """Let exclusions of groups mean the projects that this relation has; a forge that lacks it has no groups for us."""
    _groups[:] = [Groups(project, group)]


def visible(model: type[Base]) -> bool:
    """Say whether the database has the relation, where sessions look for it."""
    return bool(database.execute_sql(VISIBLE, (relation_name(model),)).fetchone()[0])


def no_groups() -> str | None:
    """Say what is missing for groups to be excluded; None where nothing is."""
    if not _groups:
        return "no relation is declared that says which projects a group has"
    if visible(_groups[0].model):
        return None
    return f"the database has no {_groups[0].said}, with a row for each project and each of its groups"


def stand(batch: str | None, *kinds: Kind) -> bool:
    """Say whether anything is excluded of the batch now, of any kind or of those."""
    asked = f"select exists (select {OF_BATCH} and kind = any(%s))"
    return bool(database.execute_sql(asked, (batch, list(kinds or KINDS))).fetchone()[0])


def excluded(batch: str | None, *, project: pw.Node | None = None, name: pw.Node | None = None) -> pw.Node:
    """Return the condition that a record of this project and name is excluded; of one that has neither, of none.

    Whether anything is excluded, and what, is asked once a statement and not of each row.
    """
    found = [] if project is None else [_of("number", "project", batch, project, "= any"), _of_group(batch, project)]
    found += [] if name is None else [_of("alike", "pattern", batch, name, "like any")]
    if not found:
        return pw.SQL("false")
    anything = pw.SQL(f"exists (select {OF_BATCH})", [batch])
    return pw.NodeList((anything, pw.NodeList(found, glue=" or ", parens=True)), glue=" and ", parens=True)


def but(condition: pw.Node) -> pw.Node:
    """Return the condition that the other is not met, for certain or perhaps."""
    return pw.NodeList((pw.SQL("("), condition, pw.SQL(") is not true")))


def written(model: type[Base], condition: pw.Node) -> str:
    """Return the condition in SQL, its values in it, over the columns of the model's table by that table's name."""
    return literal(*write_expression(model, condition))


def among(batch: str, those: Callable[[], Iterable[tuple[int | None, str | None]]]) -> set[int]:
    """Return the places of *those* that are excluded now, each of a project and a name: they are asked once a chunk."""
    if not stand(batch):
        return set()
    ones = list(those())
    condition = excluded(batch, project=pw.SQL("one.project"), name=pw.SQL("one.name"))
    text, values = database.get_sql_context().sql(condition).query()
    names = [None if name is None else _text(name) for _, name in ones]
    rows = database.execute_sql(ASKED + text, ([project for project, _ in ones], names, *values)).fetchall()
    return {place - 1 for (place,) in rows}


def sentences(batch: str) -> Iterator[str]:
    """Say what is excluded of the batch, the first of it by name."""
    standing = Exclusion.standing(batch)
    yield from (one.sentence() for one in standing[:SHOWN])
    if more := len(standing) - SHOWN:
        yield from [f"and {more:,} more are excluded: `forgekeeper exclude list` has them"] if more > 0 else []


def _of(column: str, kind: Kind, batch: str | None, of: pw.Node, operator: str) -> pw.Node:
    asked = f"(array(select {column} {OF_BATCH} and kind = '{kind}'))"
    text = "::text" if kind == "pattern" else ""
    return pw.NodeList((pw.SQL("("), of, pw.SQL(f"){text} {operator} {asked}", [batch])))


def _of_group(batch: str | None, project: pw.Node) -> pw.Node:
    """While a group is excluded of which nobody knows the projects, all are."""
    asked = f"{OF_BATCH} and kind = 'group'"
    if no_groups():
        return pw.SQL(f"exists (select {asked})", [batch])
    relation = relation_name(_groups[0].model)
    of, group = (quote_name(field.column_name) for field in _groups[0])
    owned = f"exists (select from {relation} as owned where owned.{of} = "
    in_group = f" and owned.{group} = any(array(select number {asked})))"
    # Where no group is excluded, which is asked once a statement, the relation is not looked into.
    begin = pw.SQL(f"(exists (select {asked}) and {owned}", [batch])
    return pw.NodeList((begin, project, pw.SQL(f"{in_group})", [batch])))


def _text(value: str) -> str:
    """Return what PostgreSQL can take: no NUL, no half of a character."""
    return value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def _moment(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
