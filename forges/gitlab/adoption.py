"""GitLab: views of its tables in which the batches find what they expect.

A view has the name of the example forge's table.  What a view cannot change by itself, a function or a rule changes,
with the rights of the tables' owner: the role that forgekeeper connects as has rights on the views alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from forgekeeper.database import database, definers
from forgekeeper.database.integrity import reasons_to_miss_rows
from forgekeeper.database.relations import needs
from forges.gitlab import templates
from forges.gitlab.parts import ARTIFACTS, PARTS, AdoptedPart
from models import APPLICATION, FOLLOWERS, OPTIONAL

MODELS = (*APPLICATION, *OPTIONAL)
"""What there are views of."""
RECORDS = re.compile(r"loose_foreign_keys_(\w+_)?deleted_records")
"""Where GitLab's triggers write what was deleted; versions have several such tables."""
GRANTED = {
    "forge_flags": "select",
    "ci_deleted_objects": "select, insert",
}
"""What is granted on views that no model is of."""
COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, null) from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relkind in ('r', 'p')
        and a.attnum > 0 and not a.attisdropped
    order by c.relname, a.attnum
"""
# GitLab puts it on each table that belongs to its other database.
LOCKED = """
    select c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and t.tgname like 'gitlab_schema_write_trigger_for_%%'
"""
OWNERS = """
    select c.relname, quote_ident(r.rolname) from pg_class c join pg_roles r on r.oid = c.relowner
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relname = any(%s)
    order by c.relname
"""
# Made by another role, as by a superuser who ran what --print wrote, a function runs with the rights of that role.
STRAYS = """
    select format('alter schema %%I owner to %%s;', nspname, %(owner)s) from pg_namespace
    where nspname = %(views)s and nspowner <> %(owner)s::regrole
    union all
    select format('alter table %%I.%%I owner to %%s;', nspname, relname, %(owner)s)
    from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where nspname = %(views)s and relkind in ('r', 'v') and relowner <> %(owner)s::regrole
    union all
    select format('alter function %%I.%%I(%%s) owner to %%s;', nspname, proname, arguments, %(owner)s)
    from pg_proc join pg_namespace on pg_namespace.oid = pronamespace,
        pg_get_function_identity_arguments(pg_proc.oid) as arguments
    where nspname = %(views)s and proowner <> %(owner)s::regrole
"""
OIDS = """
    select oid::bigint from pg_class where relnamespace = to_regnamespace(quote_ident(%s)) and relname = any(%s)
"""
ELSEWHERE = "select repository_storage from {}.projects where repository_storage <> 'default' limit 1"
TRIGGER_FUNCTION = re.compile(r"create or replace function VIEWS\.(\w+)\(\) returns trigger")
FOLLOWS_BY = {
    "ci_job_artifact_states": "job_artifact_id",
    "p_ci_job_artifact_reports": "job_artifact_id",
    "p_ci_build_trace_metadata": "trace_artifact_id",
}
"""The tables of the rows that PostgreSQL deletes with an artifact, with the column that has the artifact's id."""
PATH_OF_ROW = (
    "VIEWS.artifact_path(project_id, job_id, id, INSTANT(created_at), file, file_location::smallint, file_type)"
)
"""Where GitLab's uploader put the file of an artifact without a path of its own."""
INSTANT_COLUMN = re.compile(r"\bINSTANT\((\w+)\)")
"""A time of an artifact; a fork of GitLab has times without a zone, which are UTC."""
WORD = re.compile(r"\b(TABLES|VIEWS|ARTIFACTS|RECORDS|FOLLOWERS|RESTORE_FOLLOWERS|EVERY_VIEW)\b")
WHERE = re.compile(r"^(.*?) -- where there is (no )?(\w+)\.(\w+)\n", re.MULTILINE)
"""A line of a template that only versions with that column have, or only those without."""


class Unfit(Exception):
    """These tables cannot be adopted; the message says why, and what to do."""


class Adoption(NamedTuple):
    """Which tables are adopted: *tables* is their schema, *views* that of the views; *role* is granted these.

    *owner* owns the tables, and the views from now on; *strays* are the statements that give it what others own in the
    schema of the views.  Names are written as in SQL; *schema* is the first as it is.  *created* says that the views'
    is there.  *columns* has the types of the columns of each table; *elsewhere* are tables that a GitLab with two
    databases keeps in the other one.
    """

    tables: str
    views: str
    role: str | None
    owner: str
    schema: str
    created: bool
    strays: Sequence[str]
    columns: Mapping[str, Mapping[str, str]]
    elsewhere: Collection[str] = ()

    @property
    def artifacts(self) -> str:
        """Name the table of all artifacts: before GitLab 16.10 it was in no parts."""
        return "p_ci_job_artifacts" if "p_ci_job_artifacts" in self.columns else "ci_job_artifacts"

    @property
    def parts(self) -> list[AdoptedPart]:
        """Return the parts of GitLab that are adopted."""
        return [part for part in PARTS if self.why_left_out(part) is None]

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Return the views of the parts that are not adopted, by the reason; not of those that only forks have."""
        found = defaultdict[str, list[str]](list)
        for part in PARTS:
            if part.instead is None and (reason := self.why_left_out(part)) is not None:
                found[reason] += part.views
        return dict(found)

    @property
    def used(self) -> list[str]:
        """Name the tables that the views are of."""
        return sorted({self.table(table) for part in self.parts for table in part.needs})

    @property
    def comment(self) -> str:
        """Return the comment on the schema of the views: by which version, and of which columns, they are made."""
        names = [*self.used, *self.followers, *self.records]
        facts = [(name, *sorted(self.columns[name].items())) for name in names]
        digest = sha256(repr((facts, self.left_out)).encode()).hexdigest()[:16]
        return f"{templates.comment_of_version()}, {digest}, of {self.schema}"

    def table(self, name: str) -> str:
        """Return the name of a table that a part calls *name*."""
        return self.artifacts if name == ARTIFACTS else name

    def why_left_out(self, part: AdoptedPart) -> str | None:
        """Say why a part is not adopted; None if it is."""
        if part.instead in self.columns:
            return f"schema {self.schema} has {part.instead}"
        for table in map(self.table, (*part.needs, *part.beside)):
            if table in self.elsewhere:
                return f"this database is one of two, and table {table} is kept in the other"
        for table, columns in part.needs.items():
            name = self.table(table)
            if name not in self.columns:
                return f"schema {self.schema} lacks table {name}"
            if lacks := set(columns.split()) - set(self.columns[name]):
                return f"table {self.schema}.{name} lacks column {min(lacks)}"
        return None

    @property
    def records(self) -> list[str]:
        """Name the tables that say what was deleted."""
        return sorted(filter(RECORDS.fullmatch, self.columns))

    @property
    def followers(self) -> dict[str, str]:
        """Return the tables whose rows PostgreSQL deletes with an artifact, with the columns of their views."""
        wanted = {model._meta.table_name: [one.column_name for one in model._meta.sorted_fields] for model in FOLLOWERS}
        there = {table: columns for table, columns in wanted.items() if {*columns} <= {*self.columns.get(table, ())}}
        return {table: ", ".join(columns) for table, columns in there.items()}

    def statements(self) -> Iterator[str]:
        """Yield what makes the views, part by part; running it again changes nothing but what has to.

        Run it in one transaction: it sets role and search_path there.  A view keeps the functions that its search_path
        finds now, whatever is created later.
        """
        yield "set local search_path = pg_catalog, pg_temp;\n"
        # Where it is there this would still ask for the right to create one.
        if not self.created:
            yield f"create schema if not exists {self.views} authorization {self.owner};\n"
        yield from (f"{statement}\n" for statement in self.strays)
        yield f"set local role {self.owner};\n"
        yield self._filled(templates.DROP_VIEWS, EVERY_VIEW=", ".join(f"'{view}'" for view in self._all_views()))
        yield from map(
            self._filled, [*templates.BEFORE_PARTS, *(part.name for part in self.parts), *templates.AFTER_PARTS]
        )
        for table, columns in self.followers.items():
            yield f"create or replace view {self.views}.{table} as select {columns} from {self.tables}.{table};\n"
        for table in self.records:
            yield self._filled(templates.RECORDS_TEMPLATE, RECORDS=table)
        # A trigger asks for this right when it is made, and not when it fires.
        made = [*templates.BEFORE_PARTS, *(part.name for part in self.parts), *templates.AFTER_PARTS]
        functions = TRIGGER_FUNCTION.findall("".join(map(templates.read_template, made)))
        yield "".join(f"revoke execute on function {self.views}.{name}() from public;\n" for name in functions)
        yield self._filled(templates.RECORD_VIEWS)
        yield self._filled(templates.GRANT_AGAIN)
        (comment,) = database.execute_sql("select quote_literal(%s)", (self.comment,)).fetchone()
        yield f"comment on schema {self.views} is {comment};\n"
        if self.role:
            yield "".join(self._grants(self.role))

    def _all_views(self) -> list[str]:
        return [*(view for part in PARTS for view in part.views), *self.followers, *self.records]

    def _filled(self, part: str, **words: str) -> str:
        words |= {"FOLLOWERS": self._each_follower(templates.FOLLOWERS_OF_ROW, before=",")}
        words |= {"RESTORE_FOLLOWERS": self._each_follower(templates.RESTORE_FOLLOWERS)}
        return self.fill(WHERE.sub(self._where, templates.read_template(part)), words)

    def fill(self, text: str, words: Mapping[str, str] | None = None) -> str:
        """Put names and expressions into the places of a template, *words* in place of others."""
        words = {"TABLES": self.tables, "VIEWS": self.views, "ARTIFACTS": self.artifacts, **(words or {})}
        text = INSTANT_COLUMN.sub(self._instant, text.replace("PATH_OF_ROW", PATH_OF_ROW))
        return WORD.sub(lambda word: words[word[0]], text)

    def _instant(self, column: re.Match[str]) -> str:
        has_no_zone = self.columns[self.artifacts].get(column[1], "").endswith("without time zone")
        return f"({column[1]} at time zone 'UTC')" if has_no_zone else column[1]

    def _each_follower(self, template: str, *, before: str = "") -> str:
        tables = [table for table in self.followers if table in FOLLOWS_BY]
        return "".join(
            before + template.format(tables=self.tables, table=table, column=FOLLOWS_BY[table]) for table in tables
        )

    def _where(self, line: re.Match[str]) -> str:
        there = line[4] in self.columns.get(self.table(line[3]), ())
        return f"{line[1]}\n" if there is not bool(line[2]) else ""

    def _grants(self, role: str) -> Iterator[str]:
        yield f"grant usage on schema {self.views} to {role};\n"
        rights = {model._meta.table_name: ", ".join(needs(model)) for model in MODELS} | GRANTED
        made = [view for part in self.parts for view in part.views]
        granted = {view: rights[view] for view in made} | dict.fromkeys(self.followers, "select")
        for view, of_view in (granted | dict.fromkeys(self.records, "select, insert")).items():
            yield f"grant {of_view} on {self.views}.{view} to {role};\n"


def fit(tables: str, views: str, role: str | None) -> Adoption:
    """Look at the tables, and return how they are adopted; raise `Unfit` where they cannot be."""
    if views == tables:
        raise Unfit(
            f"schema {views} is that of GitLab's own tables: set FORGEKEEPER_FORGE_SCHEMA to another one for the views,"
            " such as forgekeeper_gitlab"
        )
    if role and not database.execute_sql("select true from pg_roles where rolname = %s", (role,)).fetchone():
        raise Unfit(f"there is no role {role}: create it first, `create role {role} login`")
    found = look(tables, views, role)
    _insist(found)
    owner = _find_owner(found)
    for sentence in definers.find_strangers([tables, views], owner):
        raise Unfit(sentence)
    strays = database.execute_sql(STRAYS, {"views": views, "owner": owner}).fetchall()
    return found._replace(owner=owner, strays=[statement for (statement,) in strays])


def look(tables: str, views: str, role: str | None = None) -> Adoption:
    """Return what would be adopted of the tables, without an owner; nothing is asked of their rights."""
    columns = defaultdict[str, dict[str, str]](dict)
    for table, column, its_type in database.execute_sql(COLUMNS, (tables,)).fetchall():
        columns[table][column] = its_type
    elsewhere = {table for (table,) in database.execute_sql(LOCKED, (tables,)).fetchall()}
    (created,) = database.execute_sql("select to_regnamespace(quote_ident(%s)) is not null", (views,)).fetchone()
    names = _quoted(tables), _quoted(views), role and _quoted(role)
    return Adoption(*names, "", tables, created, (), dict(columns), elsewhere)


def other_storage(found: Adoption) -> str | None:
    """Return a storage, other than the one whose repositories the views show, on which there are projects."""
    if not any(part.name == "projects" for part in found.parts):
        return None
    row = database.execute_sql(ELSEWHERE.format(found.tables)).fetchone()
    return row and str(row[0])


def _quoted(name: str) -> str:
    (quoted,) = database.execute_sql("select quote_ident(%s)", (name,)).fetchone()
    return str(quoted)


def _insist(found: Adoption) -> None:
    if not found.parts:
        raise Unfit(f"schema {found.schema} lacks GitLab's tables: name that of GitLab's tables with --tables")
    # Notes of deletions that are not found are removed.
    found_tables = database.execute_sql(OIDS, (found.schema, found.used)).fetchall()
    if reason := next(reasons_to_miss_rows([oid for (oid,) in found_tables]), None):
        raise Unfit(reason)


def _find_owner(found: Adoption) -> str:
    """Return the role that owns the tables, as SQL writes its name; raise `Unfit` if they have several owners."""
    (first, owner), *others = database.execute_sql(OWNERS, (found.schema, found.used)).fetchall()
    for table, another in others:
        if another != owner:
            raise Unfit(f"table {first} belongs to {owner} and table {table} to {another}: give them one owner first")
    return str(owner)


def insist_on_owner(found: Adoption) -> None:
    """Raise `Unfit` unless this session may become the role that owns the tables."""
    (may_become,) = database.execute_sql("select pg_has_role(%s::regrole, 'member')", (found.owner,)).fetchone()
    if not may_become:
        raise Unfit(f"the tables belong to {found.owner}: run this as that role, or let it run what --print writes")
