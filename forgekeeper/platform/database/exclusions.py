"""Exclusions: rows that keep batches from projects, groups and names, added by people.

Exclusions are a part of the condition of a deletion.  The statement that deletes a chunk checks them itself, so an
exclusion that is added during a run counts from the next chunk on.  Records outside the database are checked against
the same condition, once per chunk.  Project exclusions ignore records without a project; patterns ignore records
without a name.

Only the forge knows the projects of a group: a relation of the forge lists them, if it has one (`groups`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.database import Base, BigIdentityField, database, default_sql
from forgekeeper.platform.database.naming import quote_name, relation_name, shown_name, write_expression
from forgekeeper.platform.database.sessions import execute_prepared
from forgekeeper.platform.database.survey import inline_values
from metrics.logs import clean_input

ExclusionKind = Literal["project", "group", "pattern"]
EXCLUSION_KINDS: tuple[ExclusionKind, ...] = get_args(ExclusionKind)
EXCLUDED_REASON = "excluded"
"""The reason of a record that is kept."""
MAX_SHOWN_EXCLUSIONS = 10
"""Maximum exclusions that `sentences` names."""
IS_IN_FORCE = "(until is null or until > clock_timestamp())"
FROM_EXCLUSIONS_IN_FORCE = f"from exclusions where {IS_IN_FORCE} and coalesce(batch = %s, true)"
"""Exclusions of all batches and of one batch; if the batch is NULL, of every batch."""
SELECT_HAS_EXCLUSIONS = f"""
    select exists (
        select {FROM_EXCLUSIONS_IN_FORCE.replace("%s", "%(batch)s::text")} and kind = any(%(kinds)s::text[])
    )
"""
EXCLUDES_SOMETHING = """
    case kind when 'project' then number is not null when 'group' then number is not null
        when 'pattern' then alike is not null else false end
"""
"""Check constraint: rows that people insert with SQL exclude something, too."""
SUBJECT_NUMBER_PATTERN = re.compile(r"[0-9]{1,18}", re.ASCII)
LIKE_SPECIAL_CHARACTERS = re.compile(r"[\\%_]")
SELECT_IS_VISIBLE = "select to_regclass(%s) is not null"
SELECT_EXCLUDED_PLACES = (
    "select place from unnest(%s::bigint[], %s::text[]) with ordinality as one (project, name, place) where "
)


class BadExclusion(ValueError):
    """The text is not an exclusion; the message says in a sentence how to write exclusions."""


class ExclusionSubject(NamedTuple):
    """The subject of an exclusion: the *number* of a project or group, or a pattern.

    *alike* is the pattern as an operand of ``like``.
    """

    kind: ExclusionKind
    subject: str
    number: int | None = None
    alike: str | None = None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a subject such as ``project:7``; raise `BadExclusion` if it can exclude nothing."""
        kind, _, subject = text.partition(":")
        if kind not in EXCLUSION_KINDS or not subject:
            raise BadExclusion(f"cannot exclude {text!r}: write project:7, group:9 or 'pattern:uploads/*'")
        if kind != "pattern" and not SUBJECT_NUMBER_PATTERN.fullmatch(subject):
            raise BadExclusion(f"{subject!r} is not the number of a {kind}: write {kind}:7")
        if kind != "pattern":
            return cls(cast("ExclusionKind", kind), str(int(subject)), number=int(subject))
        if "\0" in subject:
            raise BadExclusion("a pattern cannot contain NUL, because no name does")
        return cls(
            "pattern",
            subject,
            alike=LIKE_SPECIAL_CHARACTERS.sub(r"\\\g<0>", subject).replace("*", "%").replace("?", "_"),
        )


class Exclusion(Base):
    """An exclusion from one batch or all, until it ends or is removed.

    *subject* is the text that a person wrote.
    """

    grants = "person: select, insert, delete; worker: select, update (until), delete; exporter: select"

    id = BigIdentityField()
    kind = pw.TextField()
    subject = pw.TextField()
    number = pw.BigIntegerField(null=True)
    alike = pw.TextField(null=True)
    batch = pw.TextField(null=True)
    reason = pw.TextField()
    by = pw.TextField()
    since = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    until = DateTimeTZField(null=True)

    class Meta:
        table_name = "exclusions"
        constraints = [pw.Check(EXCLUDES_SOMETHING, name="exclusions_kind")]  # noqa: RUF012

    @property
    def what(self) -> str:
        """The excluded subject as people write it, such as ``project:7``."""
        return f"{self.kind}:{self.subject}"

    @classmethod
    def add(
        cls, what: ExclusionSubject, *, batch: str | None, reason: str, by: str, since: datetime, until: datetime | None
    ) -> Exclusion:
        """Add an exclusion and return it; existing exclusions stay."""
        facts = {"batch": batch, "reason": clean_input(reason), "by": clean_input(by), "since": since, "until": until}
        made: Exclusion = cls.create(**what._asdict(), **facts)
        return made

    @classmethod
    def list_in_force(cls, batch: str | None = None) -> list[Exclusion]:
        """Return the exclusions in force, the oldest first: all, or those for a batch."""
        query = cls.select().where(pw.SQL(IS_IN_FORCE)).order_by(cls.id)
        return list(query if batch is None else query.where(cls.batch.is_null() | (cls.batch == batch)))

    def to_sentence(self) -> str:
        """Return a sentence: subject, batch, end, person, start and reason of the exclusion."""
        of_batch = f" of {self.batch}" if self.batch else ""
        until = f" until {_format_instant(self.until)}" if self.until else ""
        return (
            f"{self.what} is excluded{of_batch}{until} by {self.by} since {_format_instant(self.since)} ({self.reason})"
        )


class Groups(NamedTuple):
    """The relation of the forge with the projects of groups: one row per project and group."""

    project: pw.Field[Any]
    group: pw.Field[Any]

    @property
    def model(self) -> type[Base]:
        """The model of the relation."""
        model: type[Base] = self.project.model
        return model

    @property
    def display_name(self) -> str:
        """The relation's name in SQL, with its columns."""
        return f"{shown_name(self.model)} ({self.project.column_name}, {self.group.column_name})"


_declared_groups: list[Groups] = []


def declare_groups(project: pw.Field[Any], group: pw.Field[Any]) -> None:
    """Declare the relation from which exclusions of groups read the groups' projects.

    A forge without the relation has no groups for us.
    """
    _declared_groups[:] = [Groups(project, group)]


def is_visible(model: type[Base]) -> bool:
    """Return whether the relation exists in a schema that sessions search."""
    return bool(database.execute_sql(SELECT_IS_VISIBLE, (relation_name(model),)).fetchone()[0])


def why_no_groups() -> str | None:
    """Return why groups cannot be excluded, None if they can."""
    if not _declared_groups:
        return "no relation with the projects of groups is declared"
    if is_visible(_declared_groups[0].model):
        return None
    return f"the database lacks {_declared_groups[0].display_name}, with a row for each project and each of its groups"


def has_exclusions(batch: str | None, *kinds: ExclusionKind) -> bool:
    """Return whether the batch has exclusions in force, of the given *kinds* or of any kind."""
    # Prepared: a child of a small project asks it for a handful of records.
    values = {"batch": batch, "kinds": list(kinds or EXCLUSION_KINDS)}
    return bool(execute_prepared("has_exclusions", SELECT_HAS_EXCLUSIONS, values).fetchone()[0])


def excluded_condition(batch: str | None, *, project: pw.Node | None = None, name: pw.Node | None = None) -> pw.Node:
    """Return the condition that a record is excluded, false if project and name are None.

    PostgreSQL reads the exclusions once per statement, not once per row.
    """
    found = (
        []
        if project is None
        else [_excluded_by("number", "project", batch, project, "= any"), _excluded_by_group(batch, project)]
    )
    found += [] if name is None else [_excluded_by("alike", "pattern", batch, name, "like any")]
    if not found:
        return pw.SQL("false")
    anything = pw.SQL(f"exists (select {FROM_EXCLUSIONS_IN_FORCE})", [batch])
    return pw.NodeList((anything, pw.NodeList(found, glue=" or ", parens=True)), glue=" and ", parens=True)


def is_not_true(condition: pw.Node) -> pw.Node:
    """Return the condition that *condition* is false or NULL."""
    return pw.NodeList((pw.SQL("("), condition, pw.SQL(") is not true")))


def condition_sql(model: type[Base], condition: pw.Node) -> str:
    """Return the condition as SQL with its values; columns have the name of the model's table."""
    return inline_values(*write_expression(model, condition))


def find_excluded(batch: str, list_records: Callable[[], Iterable[tuple[int | None, str | None]]]) -> set[int]:
    """Return the positions of the excluded records; *list_records* returns a project and a name of each.

    Called once per chunk; *list_records* is called only if the batch has exclusions.
    """
    if not has_exclusions(batch):
        return set()
    ones = list(list_records())
    condition = excluded_condition(batch, project=pw.SQL("one.project"), name=pw.SQL("one.name"))
    text, values = database.get_sql_context().sql(condition).query()
    names = [None if name is None else _clean_text(name) for _, name in ones]
    rows = database.execute_sql(
        SELECT_EXCLUDED_PLACES + text, ([project for project, _ in ones], names, *values)
    ).fetchall()
    return {place - 1 for (place,) in rows}


def describe_exclusions(batch: str) -> Iterator[str]:
    """Yield a sentence for each of the first `MAX_SHOWN_EXCLUSIONS` exclusions, then the number of others."""
    standing = Exclusion.list_in_force(batch)
    yield from (one.to_sentence() for one in standing[:MAX_SHOWN_EXCLUSIONS])
    if more := len(standing) - MAX_SHOWN_EXCLUSIONS:
        yield from [f"and {more:,} more exclusions: `forgekeeper exclude list` shows them"] if more > 0 else []


def _excluded_by(column: str, kind: ExclusionKind, batch: str | None, operand: pw.Node, operator: str) -> pw.Node:
    asked = f"(array(select {column} {FROM_EXCLUSIONS_IN_FORCE} and kind = '{kind}'))"
    text = "::text" if kind == "pattern" else ""
    return pw.NodeList((pw.SQL("("), operand, pw.SQL(f"){text} {operator} {asked}", [batch])))


def _excluded_by_group(batch: str | None, project: pw.Node) -> pw.Node:
    """Return the condition of excluded groups.

    If nobody knows the projects of groups, one excluded group excludes all projects.
    """
    asked = f"{FROM_EXCLUSIONS_IN_FORCE} and kind = 'group'"
    if why_no_groups():
        return pw.SQL(f"exists (select {asked})", [batch])
    relation = relation_name(_declared_groups[0].model)
    project_column, group = (quote_name(field.column_name) for field in _declared_groups[0])
    owned = f"exists (select from {relation} as owned where owned.{project_column} = "
    in_group = f" and owned.{group} = any(array(select number {asked})))"
    # If no group is excluded, which PostgreSQL checks once per statement, the relation is not read.
    begin = pw.SQL(f"(exists (select {asked}) and {owned}", [batch])
    return pw.NodeList((begin, project, pw.SQL(f"{in_group})", [batch])))


def _clean_text(value: str) -> str:
    """Return text that PostgreSQL accepts: without NULs and without lone surrogates."""
    return value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def _format_instant(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
