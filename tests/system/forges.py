"""Adopt every known forge and let each batch work there: the table of docs/forges.md.

``python -m tests.system.forges`` builds the tables of each forge in a database of its own, once for each PostgreSQL that
this machine has, adopts them as the pages say, and runs each batch by its command.  A batch runs if it ends well; it is
blocked with a sentence.  Artifacts that have gone are those that are due, and then come back byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg2

from demo import servers as embedded
from forgekeeper.platform.settings import PREFIX
from forges.facts import FACT_LABELS
from forges.forgejo.facts import FACTS as FORGEJO
from forges.gitlab.facts import FACTS as GITLAB
from tests.cli.test_adopting_page import NOW
from tests.cli.test_adopting_page import PAGE as EXAMPLE
from tests.cli.test_adopting_page import ROWS as EXAMPLE_ROWS
from tests.harness import gitlab_tables
from tests.harness.gitlab_versions import VERSIONS

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests" / "harness"
PAGE = ROOT / "docs" / "forges.md"
BATCHES = (
    *("user_status_cleanup", "git_ref_cleanup", "expired_job_artifacts", "delete_objects", "stale_direct_uploads"),
    "stale_imports",
)
FACTS_BEGIN = "<!-- The facts are written in `forges/*/facts.py`. -->\n"
BEGIN = "<!-- The table is what `python -m tests.system.forges --write` has found. -->\n"
DUE_IN_GISIA = """
    select artifact.id from ci_job_artifacts as artifact
        join ci_builds on ci_builds.id = job_id join ci_pipelines as pipeline on pipeline.id = commit_id
    where expire_at < now() at time zone 'UTC' and file_type <> 3 and pipeline.locked = 0
"""
DUE_IN_FORGEJO = """
    select id from action_artifact where (status = 2 and expired_unix < extract(epoch from now())) or status = 5
        or (status = 1 and updated_unix < extract(epoch from now()) - 86400)
"""
GITLAB_FLAG = """
    insert into features (key) values ('bulk_delete_job_artifacts');
    insert into feature_gates (feature_key, key, value) values ('bulk_delete_job_artifacts', 'boolean', 'true')
"""
AT_ONCE = 2
"""Forges that are judged at one time, each in a database of PostgreSQL and of Redis of its own."""
SMALL = {"artifacts": 300, "statuses": 40, "imports": 80, "deletions": 40}


@dataclass
class Forge:
    """How the tables of a forge are made, which of its artifacts are due, and how they are seen in the end."""

    adopt: Sequence[str]
    due: str
    whole: Sequence[str]
    gone: str
    changes: str = ""
    sql: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def known() -> dict[str, Forge]:
    """Return every forge of which a table has been written, by its name."""
    whole = ("p_ci_job_artifacts", "project_statistics")
    found = {
        f"GitLab {version}": Forge(
            ("gitlab", "--tables", "gitlab"),
            gitlab_tables.DUE["artifacts"],
            whole,
            "select id from p_ci_job_artifacts",
            changes,
        )
        for version, changes in VERSIONS.items()
    }
    artifacts = ("ci_job_artifacts",)
    tables, *views, _grants = re.findall(r"```sql\n(.*?)```", EXAMPLE.read_text(), re.DOTALL)
    found["the example"] = Forge(
        (),
        f"select file from build_files where not removed and kind <> 'log' and keep = false and until_s < {NOW}",
        ("build_files", "repos"),
        "select file from build_files where not removed",
        sql="".join((tables, EXAMPLE_ROWS, *views)),
        settings={"FORGE_SCHEMA": "tide_views"},
    )
    found["Gisia"] = Forge(
        ("gitlab",),
        DUE_IN_GISIA,
        artifacts,
        "select id from ci_job_artifacts",
        sql=(HARNESS / "gisia_tables.sql").read_text(),
        settings={"UNKNOWN_LOCKS": "resolve"},
    )
    expired = "select id from action_artifact where status not in (4, 6) and not (status = 3 and mod(run_id, 7) = 0)"
    found["Forgejo, Gitea"] = Forge(
        ("forgejo",),
        DUE_IN_FORGEJO,
        ("action_artifact",),
        expired,
        sql=(HARNESS / "forgejo_tables.sql").read_text(),
    )
    return found


@contextmanager
def _servers(postgres: Path) -> Iterator[embedded.Servers]:
    """Run that PostgreSQL; before 17 it knows no locales of its own."""
    options, programs = embedded.INITDB_OPTIONS, embedded.find_programs
    own = [one for one in options if "locale" not in one]
    embedded.find_programs = lambda: replace(programs(), postgres=str(postgres))
    embedded.INITDB_OPTIONS = options if "pginstall18" in str(postgres) else (*own, "--no-locale")
    try:
        with embedded.run_servers() as running:
            yield running
    finally:
        embedded.INITDB_OPTIONS, embedded.find_programs = options, programs


def postgres_folders() -> list[Path]:
    """Return the folders of the programs of each PostgreSQL that this machine has."""
    wheel = embedded.find_programs().postgres
    return [*Path("/usr/lib/postgresql").glob("*/bin"), *sorted(Path(wheel).parents[1].glob("pginstall*/bin"))]


def judge(running: embedded.Servers, name: str, forge: Forge, number: int) -> dict[str, str]:
    """Adopt the forge, run each batch, and return of each what came of it; raise `AssertionError` for what is wrong."""
    database = re.sub(r"\W+", "_", name).lower()
    with closing(psycopg2.connect(running.database_url)) as maker, TemporaryDirectory() as folder:
        maker.autocommit = True
        with maker.cursor() as cursor:
            cursor.execute(f"create database {database}; ")
            cursor.execute(f"create role keeper_of_{database} login")
        redis_url = running.redis_url.replace("db=0", f"db={number}")
        url = running.database_url.replace("@/forgekeeper", f"@/{database}")
        with closing(psycopg2.connect(url)) as owner, owner.cursor() as cursor:
            owner.autocommit = True
            _build(cursor, forge)
            world = _World(url, redis_url, Path(folder), f"keeper_of_{database}", forge.settings)
            return _work(world, cursor, forge)


class _World:
    """The commands, as the owner of the tables and as forgekeeper's role."""

    def __init__(self, url: str, redis_url: str, folder: Path, role: str, more: Mapping[str, str]) -> None:
        self.role, self.objects, self.repositories = role, folder / "objects", folder / "repositories"
        self.runs: dict[str, int] = {}
        self.objects.mkdir()
        self.repositories.mkdir()
        stores = {location: (self.objects / location).as_uri() for location in ("artifacts", "artifacts_local")}
        self._owner = {
            "DATABASE_URL": url,
            "REDIS_URL": redis_url,
            "FORGE_SCHEMA": "adopted",
            "OBJECT_STORES": json.dumps(stores),
            "OBJECT_GRACE": "0",
            "REPOSITORIES_ROOT": str(self.repositories),
            **more,
        }
        self.views = self._owner["FORGE_SCHEMA"]
        self._keeper = self._owner | {"DATABASE_URL": url.replace("forgekeeper@", f"{role}@", 1)}

    def call(self, *words: str, owner: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command of forgekeeper."""
        settings = self._owner if owner else self._keeper
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        command = [sys.executable, "-m", "forgekeeper.cli", *words]
        environment = kept | {PREFIX + name: value for name, value in settings.items()}
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def _build(cursor, forge: Forge) -> None:
    if forge.sql:
        cursor.execute(forge.sql)
        return
    gitlab_tables.build(cursor)
    gitlab_tables.fill(cursor, **SMALL)
    cursor.execute(forge.changes or "select")
    cursor.execute(GITLAB_FLAG)


def _work(world: _World, cursor, forge: Forge) -> dict[str, str]:
    adopt = ("adopt", *forge.adopt, "--role", world.role)
    for words in (("migrate",), *([adopt] if forge.adopt else []), ("grants", "--role", world.role)):
        done = world.call(*words, owner=True)
        assert done.returncode == 0, (words, done.stderr)
    _put_files(world, cursor)
    world.call("check", "--init")
    world.call("flags", "on", "bulk_delete_job_artifacts")
    before = [_rows(cursor, f"select line::text from {table} as line order by 1") for table in forge.whole]
    due = {number for (number,) in _rows(cursor, forge.due.format(projects=gitlab_tables.PROJECTS))}
    there = {number for (number,) in _rows(cursor, forge.gone)}
    ended = {batch: _run(world, batch) for batch in BATCHES if batch != "delete_objects"}
    left = {number for (number,) in _rows(cursor, forge.gone)}
    assert there - left == due & there, (len(there - left), len(due & there))
    held = json.loads(world.call("objects", "hold", "--run", str(world.runs["expired_job_artifacts"]), "--json").stdout)
    cursor.execute("\n".join(held["statements"]))
    after = [_rows(cursor, f"select line::text from {table} as line order by 1") for table in forge.whole]
    assert after == before
    return ended | {"delete_objects": _run(world, "delete_objects")}


def _put_files(world: _World, cursor) -> None:
    """Put the object of each artifact into its store, and a repository into each place that a project has."""
    for location, code in (("artifacts", 2), ("artifacts_local", 1)):
        paths = _rows(cursor, f"select file_final_path from {world.views}.ci_job_artifacts where file_store = {code}")
        for (path,) in [*paths, ("another",)]:
            if path:
                (world.objects / location / path).parent.mkdir(parents=True, exist_ok=True)
                (world.objects / location / path).touch()
    if _rows(cursor, f"select to_regclass('{world.views}.projects') is not null")[0][0]:
        for (path,) in _rows(cursor, f"select disk_path from {world.views}.projects"):
            subprocess.run(["git", "init", "-q", "--bare", world.repositories / path], check=True)


def _rows(cursor, query: str) -> list[tuple]:
    cursor.execute(query)
    return cursor.fetchall()


def _run(world: _World, batch: str) -> str:
    """Look at a batch, release it and run it; return ``runs`` or why it does not."""
    looked = world.call("run", batch, "--dry-run")
    if looked.returncode == 3:
        return "blocked: " + looked.stderr.strip().removeprefix("forgekeeper: ").split(": ", 1)[-1].split(": `")[0]
    world.call("release", batch, "--reason", "I have looked")
    done = world.call("run", batch, "--json")
    if done.stdout:
        world.runs[batch] = int(json.loads(done.stdout)["run"])
    return "runs" if done.returncode == 0 else f"fails: {done.stderr.strip().splitlines()[-1]}"


def facts() -> Iterator[str]:
    """Yield the lines of a table of the facts about each forge."""
    every = GITLAB | FORGEJO
    yield f"| | {' | '.join(every)} |"
    yield f"|---|{'---|' * len(every)}"
    yield from (f"| {' | '.join(row)} |" for row in zip(FACT_LABELS, *every.values(), strict=True))


def table(found: Mapping[str, Mapping[str, str]], versions: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of what each forge has come to."""
    yield f"On PostgreSQL {', '.join(versions)}; exactly the due artifacts were deleted, and came back as they were.\n"
    yield f"| forge | {' | '.join(f'`{batch}`' for batch in BATCHES)} |"
    yield f"|---|{'---|' * len(BATCHES)}"
    for name, ended in found.items():
        yield f"| {name} | {' | '.join(ended[batch] for batch in BATCHES)} |"


def main() -> None:
    """Judge every forge on every PostgreSQL, and print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", metavar="FOLDER", help="Only on the PostgreSQL whose programs are there.")
    parser.add_argument("--write", action="store_true", help="Write the table into docs/forges.md.")
    given = parser.parse_args()
    every: dict[str, dict[str, str]] = {}
    versions = []
    for folder in [Path(given.postgres)] if given.postgres else postgres_folders():
        with _servers(folder) as running:
            with closing(psycopg2.connect(running.database_url)) as connection:
                versions.append(str(connection.server_version // 10_000))
            forges = known()
            with ThreadPoolExecutor(AT_ONCE) as threads:
                judged = threads.map(partial(judge, running), forges, forges.values(), range(len(forges)))
                each = dict(zip(forges, judged, strict=True))
            for name, ended in each.items():
                sys.stderr.write(f"PostgreSQL {versions[-1]}, {name}: {ended}\n")
                if every.setdefault(name, ended) != ended:
                    raise SystemExit(f"{name} differs on PostgreSQL {versions[-1]}: {ended}, before {every[name]}")
    lines = "\n".join(table(every, sorted(versions)))
    if given.write:
        first = "\n".join(facts())
        PAGE.write_text(f"{PAGE.read_text().partition(FACTS_BEGIN)[0]}{FACTS_BEGIN}{first}\n\n{BEGIN}{lines}\n")
    else:
        sys.stdout.write(f"{lines}\n")


if __name__ == "__main__":
    main()
