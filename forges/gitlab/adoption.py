"""GitLab: views of its tables in which the batches find what they expect.

A view has the name of the example forge's table.  What a view cannot change by itself, a function or a rule changes,
with the rights of the tables' owner: the role that forgekeeper connects as has rights on the views alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from typing import NamedTuple

from forgekeeper.database import database
from forgekeeper.database.integrity import reasons_to_miss_rows
from forgekeeper.database.relations import needs
from models import APPLICATION, OPTIONAL, JobLock

MODELS = tuple(model for model in (*APPLICATION, *OPTIONAL) if model is not JobLock)
"""What there are views of; a job of GitLab's finds out whether artifacts are locked, so none is of what locks them."""
PARTS = (
    *("paths", "user_statuses", "artifacts", "locks", "statistics", "projects", "ref_deletions", "imports", "flags"),
    *("outbox", "deletions"),
)
"""What is made, in this order."""
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
"""
# GitLab puts it on each table that belongs to its other database.
LOCKED = """
    select c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and t.tgname like 'gitlab_schema_write_trigger_for_%%'
        and c.relname = any(%s)
    order by c.relname limit 1
"""
FOREIGN = """
    select c.relname, quote_ident(r.rolname) from pg_class c join pg_roles r on r.oid = c.relowner
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relname = any(%s)
        and not pg_has_role(c.relowner, 'usage')
    order by c.relname limit 1
"""
OIDS = """
    select oid::bigint from pg_class where relnamespace = to_regnamespace(quote_ident(%s)) and relname = any(%s)
"""
ELSEWHERE = "select repository_storage from {}.projects where repository_storage <> 'default' limit 1"
WORD = re.compile(r"\b(TABLES|VIEWS|ARTIFACTS|RECORDS)\b")
WHERE = re.compile(r"^(.*?) -- where there is (no )?(\w+)\.(\w+)\n", re.MULTILINE)
"""A line of a template that only versions with that column have, or only those without."""


class Unfit(Exception):
    """These tables cannot be adopted; the message says why, and what to do."""


class Adoption(NamedTuple):
    """Which tables are adopted: *tables* is their schema, *views* that of the views; *role* is granted these.

    All three are written as SQL has names; *schema* is the first as it is.  *created* says that the views' is there.
    """

    tables: str
    views: str
    role: str | None
    schema: str
    created: bool
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

    def statements(self) -> Iterator[str]:
        """Yield what makes the views, part by part; running it again changes nothing but what has to."""
        # Where it is there this would still ask for the right to create one.
        if not self.created:
            yield f"create schema if not exists {self.views};\n"
        for part in PARTS:
            yield self._filled(part)
        for table in self.records:
            yield self._filled("loose_foreign_keys", RECORDS=table)
        if self.role:
            yield "".join(self._grants(self.role))

    def _filled(self, part: str, **words: str) -> str:
        words |= {"TABLES": self.tables, "VIEWS": self.views, "ARTIFACTS": self.artifacts}
        text = (files(__package__) / "sql" / f"{part}.sql").read_text(encoding="utf-8")
        return WORD.sub(lambda word: words[word[0]], WHERE.sub(self._where, text))

    def _where(self, line: re.Match[str]) -> str:
        there = line[4] in self.columns.get(line[3], ())
        return f"{line[1]}\n" if there is not bool(line[2]) else ""

    def _grants(self, role: str) -> Iterator[str]:
        yield f"grant usage on schema {self.views} to {role};\n"
        of_models = {model._meta.table_name: ", ".join(needs(model)) for model in MODELS}
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
    columns: dict[str, set[str]] = {}
    for table, column in database.execute_sql(COLUMNS, (tables,)).fetchall():
        columns.setdefault(table, set()).add(column)
    (created,) = database.execute_sql("select to_regnamespace(quote_ident(%s)) is not null", (views,)).fetchone()
    found = Adoption(_quoted(tables), _quoted(views), role and _quoted(role), tables, created, columns)
    _insist(found)
    return found


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


def insist_on_owner(found: Adoption) -> None:
    """Raise `Unfit` unless this session has the rights of those who own the tables: the views hand them on."""
    if foreign := database.execute_sql(FOREIGN, (found.schema, list(found.needed))).fetchone():
        raise Unfit(
            f"table {foreign[0]} belongs to {foreign[1]}: run this as that role, or let it run what --print writes"
        )
