"""Worlds to preview: of each batch some records that are due in some way, or stay for some reason.

A world knows of each way whether a run would take it: it repeats none of the product's conditions.  Its keys are
small numbers; `put` brings the record of a key into a way, whatever it was before, as somebody else's session does.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.declaring.flags import FeatureFlag
from tests.harness.git_samples import Bare, put_root
from tests.harness.performing import perform
from tests.preview.stored import Objects, Uploads
from tests.preview.world import DAY, HOUR, MICROSECOND, NOON, World
from workers import expired_job_artifacts, git_ref_cleanup
from workers.expired_job_artifacts import buckets

BUCKETS = 5
PROCESS = "id, kind, host, pid, version, alive_at, silent_from"


class Statuses(World):
    batch = "user_status_cleanup"
    tables = ("user_statuses",)
    ways: ClassVar = {"long ago": True, "now": True, "a microsecond later": False, "later": False, "never": False}
    locking = "select 1 from user_statuses where user_id = any(%(keys)s) for update"
    instants: ClassVar = {
        "long ago": -DAY,
        "now": 0 * DAY,
        "a microsecond later": MICROSECOND,
        "later": DAY,
        "never": None,
    }

    def put(self, other, key, way):
        shift = self.instants[way]
        other.execute(
            "insert into user_statuses (user_id, clear_status_at) values (%s, %s)"
            " on conflict (user_id) do update set clear_status_at = excluded.clear_status_at",
            (key, None if shift is None else NOON + shift),
        )

    def present(self):
        return self.ids("select user_id from user_statuses")


class Artifacts(World):
    batch = "expired_job_artifacts"
    tables = ("ci_job_artifacts", "ci_deleted_objects", "project_statistics")
    ways: ClassVar = {
        "long ago": True,
        "a microsecond ago": True,
        "now": False,
        "later": False,
        "never": False,
        "locked": False,
        "unknown": False,
        "trace": False,
        "no path": False,
        "no object": True,
    }
    locking = "select 1 from ci_job_artifacts where id = any(%(keys)s) for update"
    instants: ClassVar = {"a microsecond ago": -MICROSECOND, "now": 0 * DAY, "later": DAY, "never": None}

    def empty(self):
        super().empty()
        FeatureFlag.turn(expired_job_artifacts.FLAG, on=True)
        buckets.tidy(client, BUCKETS)

    def put(self, other, key, way):
        shift = self.instants.get(way, -DAY)
        other.execute(
            "insert into ci_job_artifacts"
            " (id, project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict (id) do update set"
            " file_type = excluded.file_type, file = excluded.file, file_final_path = excluded.file_final_path,"
            " expire_at = excluded.expire_at, locked = excluded.locked",
            (
                *(key, 1 + key % 3, key, 3 if way == "trace" else 1, None if way == "no object" else "x.zip"),
                *("" if way.startswith("no ") else f"ab/{key}", None if key % 5 == 0 else key),
                *(None if shift is None else NOON + shift, {"locked": 1, "unknown": 2}.get(way, 0)),
            ),
        )

    def present(self):
        return self.ids("select id from ci_job_artifacts")

    def run(self):
        for _ in range(BUCKETS):
            perform(expired_job_artifacts.delete_artifact_bucket, settings=self.settings, now=self.at)


class Refs(World):
    batch = "git_ref_cleanup"
    tables = ("batched_git_ref_updates_deletions", "projects")
    ways: ClassVar = {
        "there": True,
        "as expected": True,
        "gone already": False,
        "moved": False,
        "its lock held": False,
        "closed": False,
        "default branch": False,
        "no name": False,
        "another in its way": False,
    }
    at = None
    projects = (1, 2)
    stray = 1_000

    def options(self):
        self.root = put_root(self.folder / "repositories")
        self.repositories = {number: Bare(self.root, f"{number}.git") for number in self.projects}
        return {"repositories_root": self.root}

    def folders(self):
        return [self.root]

    def empty(self):
        super().empty()
        for number, repository in self.repositories.items():
            shutil.rmtree(repository.path / "refs" / "mr", ignore_errors=True)
            # All the time, so that nobody has to write what git may read.
            strays = [f"refs/stray/{key}" for key in range(1, 41)]
            repository.packed(*(f"{ref}/head" for ref in strays))
            repository.loose(*strays)
            database.execute_sql("insert into projects values (%s, %s)", (number, repository.disk_path))

    def of(self, key):
        return self.repositories[self.projects[key % len(self.projects)]]

    def put(self, other, key, way):
        others = {
            "default branch": "refs/heads/main",
            "no name": "HEAD",
            "another in its way": f"refs/stray/{key}/head",
        }
        repository, ref = self.of(key), others.get(way)
        lock = repository.path / f"refs/mr/{key}.lock"
        lock.unlink(missing_ok=True)
        if way == "gone already":
            (repository.path / f"refs/mr/{key}").unlink(missing_ok=True)
        else:
            repository.loose(f"refs/mr/{key}")
        if way == "its lock held":
            lock.touch()
        oid = {"as expected": repository.one, "moved": "1" * 40}.get(way)
        other.execute(
            "insert into batched_git_ref_updates_deletions (id, project_id, ref, expected_oid, status)"
            " values (%s, %s, %s, %s, %s) on conflict (id) do update set"
            " ref = excluded.ref, expected_oid = excluded.expected_oid, status = excluded.status",
            (key, self.projects[key % 2], ref or f"refs/mr/{key}", oid, 2 if way == "closed" else 1),
        )

    def key(self, part, number, _name):
        return int(number) if part.record == "git_ref_deletion" else None

    def present(self):
        refs = {ref for repository in self.repositories.values() for ref in repository.refs()}
        strays = {self.stray + int(ref.split("/")[2]) for ref in refs if ref.startswith("refs/stray/")}
        mine = {int(ref.rpartition("/")[2]) for ref in refs if ref.startswith("refs/mr/") and "." not in ref}
        return mine | strays

    def run(self):
        for project in self.projects:
            perform(git_ref_cleanup.clean_project_refs, project, settings=self.settings)


class Imports(World):
    """Odd keys are imports, even ones entities with two trackers each, one of them unfinished."""

    batch = "stale_imports"
    tables = ("bulk_import_trackers", "bulk_import_entities", "bulk_imports")
    ways: ClassVar = {
        "long ago": True,
        "with failures": True,
        "a microsecond before": True,
        "a day ago": False,
        "fresh": False,
        "finished": False,
    }
    locking = (
        "select 1 from bulk_imports where id = any(%(keys)s) for update;"
        "select 1 from bulk_import_entities where id = any(%(keys)s) for update"
    )
    instants: ClassVar = {"a microsecond before": -DAY - MICROSECOND, "a day ago": -DAY, "fresh": -HOUR}

    def put(self, other, key, way):
        touched, status = NOON + self.instants.get(way, -3 * DAY), 2 if way == "finished" else key % 3 % 2
        change = "on conflict (id) do update set status = excluded.status, updated_at = excluded.updated_at"
        failures = ", has_failures = excluded.has_failures"
        if key % 2:
            insert = "insert into bulk_imports (id, user_id, status, updated_at) values (%s, 1, %s, %s)"
            other.execute(f"{insert} {change}", (key, status, touched))
            return
        insert = (
            "insert into bulk_import_entities (id, bulk_import_id, source_full_path, destination_name,"
            " destination_namespace, status, updated_at, has_failures) values (%s, 1, 'a/b', 'b', 'a', %s, %s, %s)"
        )
        other.execute(f"{insert} {change}{failures}", (key, status, touched, way == "with failures"))
        trackers = "insert into bulk_import_trackers (id, bulk_import_entity_id, relation, status, updated_at)"
        for number, tracker in ((2 * key, (0, 1, 3)[key % 3]), (2 * key + 1, 2)):
            other.execute(f"{trackers} values (%s, %s, 'r', %s, %s) {change}", (number, key, tracker, NOON))

    def key(self, part, number, _name):
        return int(number) if part.record != "tracker" else None

    def present(self):
        either = "select id, status from bulk_imports union all select id, status from bulk_import_entities"
        return self.ids(f"select id from ({either}) as records where status <> 3")


class Old(World):
    """By their rest modulo 4 keys are ref deletions, runs, uploads and processes."""

    batch = "prune"
    tables = ("batched_git_ref_updates_deletions", "job_runs", "settled_uploads", "processes")
    ways: ClassVar = {"long ago": True, "just old": True, "just not old": False, "young": False, "open": False}
    locking = (
        "select 1 from batched_git_ref_updates_deletions where id = any(%(keys)s) for update;"
        "select 1 from job_runs where id = any(%(keys)s) for update;"
        "select 1 from settled_uploads where path = any(%(keys)s::text[]) for update;"
        "select 1 from processes where id = any(%(keys)s) for update"
    )
    keeps = (DAY, 30 * DAY, 30 * DAY, DAY)
    records = ("ref_deletion", "job_run", "settled_upload", "process")
    newest = 1_000_000

    def empty(self):
        super().empty()
        database.execute_sql("insert into job_runs (id, batch, state) values (%s, 'old', 'started')", (self.newest,))

    def since(self, key, way):
        exact = self.keeps[key % 4]
        shifts = {"long ago": -DAY, "just old": -MICROSECOND, "just not old": 0 * DAY, "young": exact / 2}
        return NOON - exact + shifts.get(way, 100 * DAY)

    def put(self, other, key, way):
        self.remove(other, key)
        since = self.since(key, way)
        statements = (
            (
                f"insert into {self.tables[0]} (id, project_id, ref, status, processed_at) values (%s, 1, 'a', %s, %s)",
                (key, 1 if way == "open" else 2, since),
            ),
            (
                "insert into job_runs (id, batch, state, finished_at) values (%s, 'old', %s, %s)",
                (key, "succeeded", since),
            ),
            ("insert into settled_uploads values ('artifacts', %s, true, %s)", (str(key), since)),
            (
                f"insert into processes ({PROCESS}) values (%s, 'worker', 'a', %s, '1', %s, %s)",
                (key, key, since, since),
            ),
        )
        other.execute(*statements[key % 4])

    def remove(self, other, key):
        other.execute("delete from batched_git_ref_updates_deletions where id = %s", (key,))
        other.execute("delete from job_runs where id = %s", (key,))
        other.execute("delete from settled_uploads where path = %s", (str(key),))
        other.execute("delete from processes where id = %s", (key,))

    def key(self, _part, number, name):
        return int(name if name and name.isdigit() else number)

    def present(self):
        rows = " union all ".join(
            f"select {key}::bigint from {table}"
            for table, key in zip(self.tables, ("id", "id", "path", "id"), strict=True)
        )
        return self.ids(rows) - {self.newest}


class Pipelines(World):
    """Of the example, which is not among the documents."""

    batch = "stale_pipelines"
    tables = ("pipelines",)
    ways: ClassVar = {"long ago": True, "just over a year": True, "a year": False, "young": False}
    locking = "select 1 from pipelines where id = any(%(keys)s) for update"
    instants: ClassVar = {"just over a year": -365 * DAY - MICROSECOND, "a year": -365 * DAY, "young": -DAY}

    def put(self, other, key, way):
        other.execute(
            "insert into pipelines values (%s, %s) on conflict (id) do update set updated_at = excluded.updated_at",
            (key, NOON + self.instants.get(way, -800 * DAY)),
        )

    def present(self):
        return self.ids("select id from pipelines")


WORLDS = (Statuses, Refs, Artifacts, Objects, Uploads, Imports, Old, Pipelines)


def everything(folders):
    """Return all there is: each row with its place and its versions, each key of Redis, each file with its times."""
    tables = [
        name
        for (name,) in database.execute_sql(
            "select quote_ident(table_name) from information_schema.tables"
            " where table_schema = 'public' and table_type = 'BASE TABLE'"
        ).fetchall()
    ]
    rows = {
        table: database.execute_sql(
            f"select ctid::text, xmin::text, xmax::text, whole::text from {table} as whole order by ctid"
        ).fetchall()
        for table in tables
    }
    keys = {key: client.dump(key) for key in sorted(client.keys())}
    files = {str(path): _stamp(path) for folder in folders for path in (folder, *sorted(Path(folder).rglob("*")))}
    return rows, keys, files


def _stamp(path):
    with suppress(FileNotFoundError):
        found = path.lstat()
        return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None
