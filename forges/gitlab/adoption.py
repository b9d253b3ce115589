"""GitLab: adopted parts of its tables, in all known versions and forks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from forgekeeper.platform.database import database
from forges.adoption import Adoption
from forges.gitlab import indexes
from forges.gitlab.parts import ARTIFACTS_PLACEHOLDER, GITLAB_PARTS
from forges.parts import AdoptedPart
from forges.templates import read_template
from models import FOLLOWER_MODELS

DELETION_RECORD_TABLES = re.compile(r"loose_foreign_keys_(\w+_)?deleted_records")
"""Tables filled by GitLab's triggers on deletions; versions differ in their number."""
# GitLab creates this trigger on each table that belongs to its other database.
SELECT_LOCKED_TABLES = """
    select c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and t.tgname like 'gitlab_schema_write_trigger_for_%%'
"""
SELECT_OTHER_STORAGE = "select repository_storage from {}.projects where repository_storage <> 'default' limit 1"
FOLLOWER_KEY_COLUMNS = {
    "ci_job_artifact_states": "job_artifact_id",
    "p_ci_job_artifact_reports": "job_artifact_id",
    "p_ci_build_trace_metadata": "trace_artifact_id",
}
"""Tables whose rows PostgreSQL deletes with an artifact, and their columns with its id."""
PATH_OF_ROW = (
    "VIEWS.artifact_path(project_id, job_id, id, INSTANT(created_at), file, file_location::smallint, file_type)"
)
"""Path by GitLab's uploader for an artifact without a path of its own."""
TIME_COLUMNS = ("expire_at", "created_at", "updated_at")
INSTANT_COLUMN = re.compile(r"\bINSTANT\((\w+)\)")
"""A time of an artifact; a fork of GitLab has times without time zone, in UTC."""


class GitLabAdoption(Adoption):
    """The tables of a GitLab, or of a fork that has some of them."""

    forge, display_name = "gitlab", "GitLab"
    every_part = GITLAB_PARTS
    templates_before, templates_after = ("paths", "refusal"), ("deletions",)

    @property
    def artifacts_table(self) -> str:
        """Return the table of all artifacts, which was not partitioned before GitLab 16.10."""
        return "p_ci_job_artifacts" if "p_ci_job_artifacts" in self.columns else "ci_job_artifacts"

    @cached_property
    def other_database_tables(self) -> set[str]:
        """Return the tables that a GitLab with two databases keeps in the other database."""
        return {table for (table,) in database.execute_sql(SELECT_LOCKED_TABLES, (self.schema,)).fetchall()}

    @property
    def deletion_record_tables(self) -> list[str]:
        """Return the tables that record deletions."""
        return sorted(filter(DELETION_RECORD_TABLES.fullmatch, self.columns))

    @property
    def follower_columns(self) -> dict[str, str]:
        """Return tables whose rows PostgreSQL deletes with an artifact, with their views' columns."""
        wanted = {
            model._meta.table_name: [one.column_name for one in model._meta.sorted_fields] for model in FOLLOWER_MODELS
        }
        there = {table: columns for table, columns in wanted.items() if {*columns} <= {*self.columns.get(table, ())}}
        return {table: ", ".join(columns) for table, columns in there.items()}

    @property
    def additional_views(self) -> dict[str, str]:
        return dict.fromkeys(self.follower_columns, "select") | dict.fromkeys(
            self.deletion_record_tables, "select, insert"
        )

    def table_name(self, name: str) -> str:
        return self.artifacts_table if name == ARTIFACTS_PLACEHOLDER else name

    def why_left_out(self, part: AdoptedPart) -> str | None:
        for table in map(self.table_name, (*part.needs, *part.also_changes)):
            if table in self.other_database_tables:
                return f"table {table} is in GitLab's other database"
        return super().why_left_out(part)

    def write_more(self) -> Iterator[str]:
        for table, columns in self.follower_columns.items():
            yield f"create or replace view {self.views}.{table} as select {columns} from {self.tables}.{table};\n"
        for table in self.deletion_record_tables:
            yield self.write_part("loose_foreign_keys", RECORDS=table)

    def fill_template(self, text: str, **words: str) -> str:
        text = text.replace("PATH_OF_ROW", PATH_OF_ROW)
        of_each = {"RESTORE_FOLLOWERS": "restore_follower", "FOLLOWERS": "follower_of_row"}
        for word in filter(text.__contains__, of_each):
            text = text.replace(f" {word}\n", self._repeat_for_followers(of_each[word]))
        words |= {"OTHER_COLUMNS": self._other_columns, "AS_STORED": self._as_stored, "ARTIFACTS": self.artifacts_table}
        return super().fill_template(INSTANT_COLUMN.sub(self._convert_instant, text), **words)

    def find_missing_indexes(self) -> Iterator[str]:
        yield from indexes.find_missing(self, self.artifacts_table)

    def report_limits(self) -> Iterator[str]:
        row = None
        if any(part.name == "projects" for part in self.adopted_parts):
            row = database.execute_sql(SELECT_OTHER_STORAGE.format(self.tables)).fetchone()
        if row is not None:
            yield f"refs of projects on other storages than default, as on {row[0]}, are left to GitLab"

    def _repeat_for_followers(self, template: str) -> str:
        """Return a template, repeated for each table whose rows are deleted with an artifact."""
        text = read_template(self.forge, template).rstrip("\n")
        there = {table: column for table, column in FOLLOWER_KEY_COLUMNS.items() if table in self.follower_columns}
        each = (text.replace("FOLLOWER_TABLE", table).replace("FOLLOWS_BY", column) for table, column in there.items())
        return "".join(each) + "\n"

    @property
    def _other_columns(self) -> str:
        """Return the artifacts' columns that the view does not name as SQL, with trailing commas."""
        read = {
            "partition_id",
            *next(part.needs[ARTIFACTS_PLACEHOLDER] for part in GITLAB_PARTS if part.name == "artifacts").split(),
        }
        return "".join(f'"{name}", ' for name in self.columns.get(self.artifacts_table, ()) if name not in read)

    @property
    def _as_stored(self) -> str:
        """Return SQL for a JSON object of the stored values of columns that the view computes.

        It is null for artifacts whose view shows the stored values, which takes less time.
        """
        times = [name for name in TIME_COLUMNS if self._has_no_zone(name)]
        stored = ", ".join(f"'{name}', {name}" for name in ("file_final_path", *times))
        made = f"jsonb_build_object({stored})"
        return made if times else f"case when coalesce(file_final_path, '') = '' then {made} end"

    def _convert_instant(self, column: re.Match[str]) -> str:
        return f"({column[1]} at time zone 'UTC')" if self._has_no_zone(column[1]) else column[1]

    def _has_no_zone(self, column: str) -> bool:
        return self.columns[self.artifacts_table].get(column, "").endswith("without time zone")


ADOPTION_CLASS = GitLabAdoption
