"""GitLab: views of its tables in which the batches find what they expect.

A view has the name of the example forge's table.  What a view cannot change by itself, a function or a rule changes,
with the rights of the tables' owner: the role that forgekeeper connects as has rights on the views alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from forgekeeper.database import database, definers
from forgekeeper.database.integrity import reasons_to_miss_rows
from forgekeeper.database.naming import quote_name
from forgekeeper.database.relations import needs
from forges.gitlab import templates
from models import APPLICATION, FOLLOWERS, OPTIONAL, JobArtifact, JobLock

MODELS = tuple(model for model in (*APPLICATION, *OPTIONAL) if model is not JobLock)
"""What there are views of; a job of GitLab's finds out whether artifacts are locked, so none is of what locks them."""
RECORDS = re.compile(r"loose_foreign_keys_(\w+_)?deleted_records")
"""Where GitLab's triggers write what was deleted; versions have several such tables."""
GRANTED = {
    "forge_flags": "select",
    "ci_deleted_objects": "select, insert",
}
"""What is granted on views that no model is of."""
NEEDED = {
    "user_statuses": "user_id emoji message message_html availability clear_status_at",
    "ci_deleted_objects": "file_store store_dir file pick_up_at",
    "project_statistics": "project_id build_artifacts_size storage_size",
    "project_build_artifacts_size_refreshes": "id project_id state created_at updated_at",
    "projects": "id namespace_id repository_storage storage_version",
    "project_repositories": "project_id disk_path",
    "namespaces": "id traversal_ids",
    "p_batched_git_ref_updates_deletions": "id project_id partition_id ref status created_at updated_at",
    "bulk_imports": "id user_id source_type status created_at updated_at",
    "bulk_import_entities": "id bulk_import_id parent_id source_type source_full_path destination_name"
    " destination_namespace status created_at updated_at",
    "bulk_import_trackers": "id bulk_import_entity_id relation stage status created_at updated_at",
    "bulk_import_failures": "bulk_import_entity_id",
    "features": "key",
    "feature_gates": "feature_key key value",
}
ARTIFACTS = (
    "id project_id job_id partition_id file_type file_store file file_final_path file_location size expire_at locked"
    " created_at updated_at"
)
"""The columns that the views are of."""

COLUMNS = """
    select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relkind in ('r', 'p')
        and a.attnum > 0 and not a.attisdropped
    order by c.relname, a.attnum
"""
# GitLab puts it on each table that belongs to its other database.
LOCKED = """
    select c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and t.tgname like 'gitlab_schema_write_trigger_for_%%'
        and c.relname = any(%s)
    order by c.relname limit 1
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
WORD = re.compile(r"\b(TABLES|VIEWS|ARTIFACTS|RECORDS|OTHER_COLUMNS|RESTORE_FOLLOWERS)\b")
WHERE = re.compile(r"^(.*?) -- where there is (no )?(\w+)\.(\w+)\n", re.MULTILINE)
"""A line of a template that only versions with that column have, or only those without."""


class Unfit(Exception):
    """These tables cannot be adopted; the message says why, and what to do."""


class Adoption(NamedTuple):
    """Which tables are adopted: *tables* is their schema, *views* that of the views; *role* is granted these.

    *owner* owns the tables, and the views from now on; *strays* are the statements that give it what others own in the
    schema of the views.  Names are written as in SQL; *schema* is the first as it is.  *created* says that the views'
    is there.
    """

    tables: str
    views: str
    role: str | None
    owner: str
    schema: str
    created: bool
    strays: Sequence[str]
    columns: Mapping[str, Collection[str]]

    @property
    def artifacts(self) -> str:
        """Name the table of all artifacts: before GitLab 16.10 it was in no parts."""
        return "p_ci_job_artifacts" if "p_ci_job_artifacts" in self.columns else "ci_job_artifacts"

    @property
    def needed(self) -> dict[str, str]:
        """Return the tables that the views are of, with their columns."""
        return NEEDED | {self.artifacts: ARTIFACTS}

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

    @property
    def other_columns(self) -> str:
        """Return in SQL the columns of an artifact that its view has only so that it can be restored."""
        known = {one.column_name for one in JobArtifact._meta.sorted_fields}
        others = [quote_name(name) for name in self.columns[self.artifacts] if name not in known]
        return "".join(f",\n    {column}" for column in ["file_final_path as stored_path", *others])

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
        yield from map(self._filled, templates.PARTS)
        for table, columns in self.followers.items():
            yield f"create or replace view {self.views}.{table} as select {columns} from {self.tables}.{table};\n"
        for table in self.records:
            yield self._filled(templates.RECORDS_TEMPLATE, RECORDS=table)
        # A trigger asks for this right when it is made, and not when it fires.
        functions = TRIGGER_FUNCTION.findall("".join(map(templates.read_template, templates.PARTS)))
        yield "".join(f"revoke execute on function {self.views}.{name}() from public;\n" for name in functions)
        yield f"comment on schema {self.views} is '{templates.comment_of_version()}';\n"
        if self.role:
            yield "".join(self._grants(self.role))

    def _filled(self, part: str, **words: str) -> str:
        words |= {"TABLES": self.tables, "VIEWS": self.views, "ARTIFACTS": self.artifacts}
        words |= {"OTHER_COLUMNS": self._each_follower(templates.FOLLOWERS_OF_ROW, before=",") + self.other_columns}
        words |= {"RESTORE_FOLLOWERS": self._each_follower(templates.RESTORE_FOLLOWERS)}
        return WORD.sub(lambda word: words[word[0]], WHERE.sub(self._where, templates.read_template(part)))

    def _each_follower(self, template: str, *, before: str = "") -> str:
        tables = [table for table in self.followers if table in FOLLOWS_BY]
        return "".join(
            before + template.format(tables=self.tables, table=table, column=FOLLOWS_BY[table]) for table in tables
        )

    def _where(self, line: re.Match[str]) -> str:
        there = line[4] in self.columns.get(line[3], ())
        return f"{line[1]}\n" if there is not bool(line[2]) else ""

    def _grants(self, role: str) -> Iterator[str]:
        yield f"grant usage on schema {self.views} to {role};\n"
        of_models = {model._meta.table_name: ", ".join(needs(model)) for model in MODELS}
        of_models |= dict.fromkeys(self.followers, "select")
        for view, rights in (of_models | GRANTED | dict.fromkeys(self.records, "select, insert")).items():
            yield f"grant {rights} on {self.views}.{view} to {role};\n"


def fit(tables: str, views: str, role: str | None) -> Adoption:
    """Look at the tables, and return how they are adopted; raise `Unfit` where they cannot be."""
    if views == tables:
        raise Unfit(
            f"schema {views} is that of GitLab's own tables: set FORGEKEEPER_FORGE_SCHEMA to another one for the views,"
            " such as forgekeeper_gitlab"
        )
    if role and not database.execute_sql("select true from pg_roles where rolname = %s", (role,)).fetchone():
        raise Unfit(f"there is no role {role}: create it first, `create role {role} login`")
    columns: dict[str, list[str]] = {}
    for table, column in database.execute_sql(COLUMNS, (tables,)).fetchall():
        columns.setdefault(table, []).append(column)
    (created,) = database.execute_sql("select to_regnamespace(quote_ident(%s)) is not null", (views,)).fetchone()
    found = Adoption(_quoted(tables), _quoted(views), role and _quoted(role), "", tables, created, (), columns)
    _insist(found)
    owner = _find_owner(found)
    for sentence in definers.find_strangers([tables, views], owner):
        raise Unfit(sentence)
    strays = database.execute_sql(STRAYS, {"views": views, "owner": owner}).fetchall()
    return found._replace(owner=owner, strays=[statement for (statement,) in strays])


def other_storage(found: Adoption) -> str | None:
    """Return a storage, other than the one whose repositories the views show, on which there are projects."""
    row = database.execute_sql(ELSEWHERE.format(found.tables)).fetchone()
    return row and str(row[0])


def _quoted(name: str) -> str:
    (quoted,) = database.execute_sql("select quote_ident(%s)", (name,)).fetchone()
    return str(quoted)


def _insist(found: Adoption) -> None:
    for table, needed in found.needed.items():
        if table not in found.columns:
            raise Unfit(f"schema {found.schema} has no table {table}: name that of GitLab's tables with --tables")
        if lacks := set(needed.split()) - set(found.columns[table]):
            raise Unfit(
                f"table {found.schema}.{table} has no column {min(lacks)}: this is no version of GitLab that the views"
                " fit (docs/adopting.md)"
            )
    if locked := database.execute_sql(LOCKED, (found.schema, list(found.needed))).fetchone():
        raise Unfit(
            f"this database is one of two, and table {locked[0]} is kept in the other: artifacts and statistics have to"
            " be in one database, for they change in one transaction (docs/adopting.md)"
        )
    # Notes of deletions that are not found are removed.
    found_tables = database.execute_sql(OIDS, (found.schema, list(found.needed))).fetchall()
    if reason := next(reasons_to_miss_rows([oid for (oid,) in found_tables]), None):
        raise Unfit(reason)


def _find_owner(found: Adoption) -> str:
    """Return the role that owns the tables, as SQL writes its name; raise `Unfit` if they have several owners."""
    (first, owner), *others = database.execute_sql(OWNERS, (found.schema, list(found.needed))).fetchall()
    for table, another in others:
        if another != owner:
            raise Unfit(f"table {first} belongs to {owner} and table {table} to {another}: give them one owner first")
    return str(owner)


def insist_on_owner(found: Adoption) -> None:
    """Raise `Unfit` unless this session may become the role that owns the tables."""
    (may_become,) = database.execute_sql("select pg_has_role(%s::regrole, 'member')", (found.owner,)).fetchone()
    if not may_become:
        raise Unfit(f"the tables belong to {found.owner}: run this as that role, or let it run what --print writes")
