"""Sample data of the example forge for the batches, and the command `seed`."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import obstore
import peewee as pw

from demo.tables import make_tables
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connect_command, require_redis
from forgekeeper.cli.terminal import Problem, err, print_json, print_table
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.redis_register import RedisRegister
from forgekeeper.targets import stores
from forgekeeper.targets.git_command import Git, clean_first_line
from models import STALE_AFTER, BulkImport, GitRefDeletion, JobArtifact, Project, UserStatus, is_unfinished
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION, UPLOADS_REGISTER

PROJECTS_PER_SCALE, REFS_PER_REPOSITORY = 10, 100
REFUSED_REFS = ("HEAD", "main", "refs/heads/main", "refs/heads/a..b", "refs/heads/two\nlines", "refs/" + 1_020 * "x")
"""Refs that must not be deleted this way: they end as rejected, and stop no other ref."""
REDIS_UPLOADS = RedisRegister(UPLOADS_REGISTER)
MALFORMED_ENTRIES = ("no location at all", "artifacts:", "artifacts:../../etc/passwd")
"""Register entries that only a bug could write: they end as failed, and stop no others."""
GIT_TIMEOUT_SECONDS = 60.0
FIRST_COMMIT_STREAM = b"""\
commit refs/heads/main
committer Sample <sample@example.org> 1700000000 +0000
data 6
sample
"""
INSERT_SAMPLE_STATUSES = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""
INSERT_SAMPLE_PROJECTS = """
    insert into projects (id, disk_path)
    select first + n, format('sample/%%s.git', first + n)
    from (select coalesce(max(id), 0) + 1 as first from projects) as present, generate_series(0, %(total)s - 1) as n
    returning id, disk_path
"""
INSERT_REF_DELETIONS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, ref from unnest(%(projects)s::bigint[]) as project_id, unnest(%(refs)s::text[]) as ref
"""
INSERT_SAMPLE_IMPORTS = """
    with made as (
        insert into bulk_imports (user_id, status, updated_at)
        select n, case when n %% 5 = 4 then 2 else n %% 2 end,
            clock_timestamp() - case when n %% 5 in (0, 4) then interval '2 days' else interval '1 hour' end
        from generate_series(0, %(total)s - 1) as n
        returning id, status, updated_at
    ), entities as (
        insert into bulk_import_entities
            (bulk_import_id, source_full_path, destination_name, destination_namespace, status, updated_at)
        select id, 'group/sample-' || id, 'sample-' || which, 'imported', status, updated_at
        from made, generate_series(1, 2) as which
        returning id, status, updated_at
    )
    insert into bulk_import_trackers (bulk_import_entity_id, relation, status, updated_at)
    select id, 'relation-' || stage, case when status = 2 then 2 else (array[0, 1, 3, 2])[stage] end, updated_at
    from entities, generate_series(1, 4) as stage
"""
TOUCH_UNFINISHED_IMPORTS = """
    with touched as (update bulk_imports set updated_at = now() where status in (0, 1))
    update bulk_import_entities set updated_at = now() where status in (0, 1)
"""
INSERT_SAMPLE_ARTIFACTS = """
    insert into ci_job_artifacts
        (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)
    select 1 + n %% 7, n, case when n %% 10 = 8 then 3 else 1 end, 'artifacts.zip',
        format('%%s/%%s/sample-%%s-artifacts.zip', left(md5(n::text), 2), 1 + n %% 7, first + n), 100 + n %% 50,
        case when n %% 10 < 9 then clock_timestamp() - interval '1 hour' - n * interval '1 second' end,
        case n %% 10 when 6 then 1 when 7 then 2 else 0 end
    from (select coalesce(max(id), 0) + 1 as first from ci_job_artifacts) as present,
        generate_series(0, %(total)s - 1) as n
    returning file_final_path
"""
UPSERT_PROJECT_STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, sum(size) from ci_job_artifacts group by project_id
    on conflict (project_id) do update set build_artifacts_size = excluded.build_artifacts_size
"""


class SampleCount(NamedTuple):
    """Sample data: description, total, and number of due records."""

    description: str
    total: int
    due: int


def _count_records(what: str, model: type[pw.Model], due: pw.Node) -> SampleCount:
    return SampleCount(what, model.select().count(), model.select().where(due).count())


def add_statuses(total: int) -> None:
    """Add *total* statuses: of five, two are expired, two have time left, one never expires."""
    database.execute_sql(INSERT_SAMPLE_STATUSES, {"total": total})


def add_projects(total: int) -> dict[int, str]:
    """Add *total* projects; return the path of each repository by project id."""
    return dict(database.execute_sql(INSERT_SAMPLE_PROJECTS, {"total": total}).fetchall())


def add_ref_deletions(projects: Sequence[int], refs: Sequence[str]) -> None:
    """Request the deletion of *refs* in each of *projects*."""
    database.execute_sql(INSERT_REF_DELETIONS, {"projects": list(projects), "refs": list(refs)})


def create_repository(root: Path, disk_path: str, refs: Sequence[str]) -> None:
    """Create a bare repository with the branch main and *refs*, all at one commit."""
    path = root / disk_path
    path.parent.mkdir(parents=True, exist_ok=True)
    branches = b"".join(b"reset %s\nfrom refs/heads/main\n" % ref.encode() for ref in refs)
    _run_git(path, "init", "--quiet", "--bare", "--template=", "--initial-branch=main")
    _run_git(path, "fast-import", "--quiet", given=FIRST_COMMIT_STREAM + branches)
    _run_git(path, "pack-refs", "--all")


def create_refs(path: Path, refs: Sequence[str]) -> None:
    """Add *refs* to the repository at *path*, at the commit of its branch main."""
    commands = "".join(f"create {ref} refs/heads/main\n" for ref in refs)
    _run_git(path, "update-ref", "--stdin", given=commands.encode())


def count_refs(root: Path) -> int:
    """Count the refs of all repositories below *root*."""
    return sum(len(list_refs(head.parent)) for head in root.rglob("HEAD"))


def list_refs(path: Path) -> set[str]:
    """Return the refs of the repository at *path*; none if it does not exist."""
    return set(_run_git(path, "for-each-ref", "--format=%(refname)").splitlines()) if path.exists() else set()


def _run_git(path: Path, *arguments: str, given: bytes = b"") -> str:
    answer = Git(path, until=time.monotonic() + GIT_TIMEOUT_SECONDS, grace=1.0).run(*arguments, input_bytes=given)
    if answer.code != 0:
        raise OSError(f"git {arguments[0]}: {clean_first_line(answer.error_output())}")
    return answer.out.decode()


def _add_refs(scale: int, settings: Settings, *, clean: bool) -> None:
    """Add projects with repositories and deletions of refs.

    Unless *clean*, also add a project without a repository, and bad deletions.
    """
    root = settings.repositories_root
    if root is None:
        return
    made = add_projects(PROJECTS_PER_SCALE * scale)
    refs = [f"refs/merge-requests/{n}/head" for n in range(REFS_PER_REPOSITORY)]
    if clean:
        for path in made.values():
            create_repository(root, path, refs)
        add_ref_deletions([*made], refs[: REFS_PER_REPOSITORY // 2])
        return
    _never_created, *existing = made
    for number in existing:
        create_repository(root, made[number], refs)
    nobody = max(made) + 1_000_000
    add_ref_deletions([*made, nobody], refs[: REFS_PER_REPOSITORY // 2])
    add_ref_deletions(existing[:1], REFUSED_REFS)


def _count_ref_deletions(root: Path | None) -> SampleCount:
    if root is None:
        return SampleCount("git refs", 0, 0)
    pending = defaultdict[int, set[str]](set)
    for row in GitRefDeletion.select_pending():
        pending[row.project_id].add(row.ref)
    projects = Project.select().where(Project.id.in_(list(pending)))
    due = sum(len(list_refs(root / one.disk_path) & pending[one.id] - {*REFUSED_REFS}) for one in projects)
    return SampleCount("git refs", count_refs(root), due)


def add_imports(total: int, *, clean: bool = False) -> None:
    """Add *total* bulk imports with two entities of four trackers each.

    Unless *clean*, a fifth of the imports is stale.
    """
    database.execute_sql(INSERT_SAMPLE_IMPORTS, {"total": total})
    if clean:
        database.execute_sql(TOUCH_UNFINISHED_IMPORTS)


def add_artifacts(total: int) -> list[str]:
    """Add *total* job artifacts; return the paths of their objects.

    Of ten, six have expired; of the others one is locked, one has an unknown lock, one is a trace, one is kept by its
    user.
    """
    objects = [path for (path,) in database.execute_sql(INSERT_SAMPLE_ARTIFACTS, {"total": total}).fetchall()]
    database.execute_sql(UPSERT_PROJECT_STATISTICS)
    return objects


def _add_uploads(scale: int, settings: Settings, *, clean: bool) -> None:
    """Register stale and new uploads.

    *clean* stale uploads have been stale for a minute, others for a day. Unless *clean*, also register malformed
    entries.
    """
    total, location = 200 * scale, JobArtifact.location
    names = [f"uploads/{secrets.token_hex(4)}:{n}" for n in range(total)]
    stale, fresh = names[: total // 2], names[total // 2 :]
    malformed = () if clean else MALFORMED_ENTRIES
    age = MAX_UPLOAD_DURATION + timedelta(minutes=1) if clean else timedelta(days=1)
    began = client.time()[0] - age.total_seconds()
    client.zadd(
        REDIS_UPLOADS.keys.pending, dict.fromkeys([*(f"{location}:{name}" for name in stale), *malformed], began)
    )
    for name in fresh:
        REDIS_UPLOADS.prepare(client, location, name)
    _put_all_but_one(names, settings)


def _count_uploads() -> SampleCount:
    due = int(client.zcount(REDIS_UPLOADS.keys.pending, "-inf", int(client.time()[0]) - 3 * 3600))
    return SampleCount("direct uploads", REDIS_UPLOADS.count_pending(client), due)


def _put_all_but_one(names: Sequence[str], settings: Settings) -> None:
    """Store the objects of artifacts or uploads, except the first, which never arrived."""
    store = stores.for_location(JobArtifact.location, settings)
    if store is not None:
        for name in names[1:]:
            obstore.put(store.store, name, b"a sample\n")


def count_samples(settings: Settings) -> dict[str, SampleCount]:
    """Count the present sample data by batch."""
    untouched = BulkImport.updated_at < now() - STALE_AFTER
    return {
        "user_status_cleanup": _count_records("user statuses", UserStatus, UserStatus.clear_status_at <= now()),
        "git_ref_cleanup": _count_ref_deletions(settings.repositories_root),
        "expired_job_artifacts": _count_records("job artifacts", JobArtifact, JobArtifact.is_expired(now())),
        "stale_direct_uploads": _count_uploads(),
        "stale_imports": _count_records("bulk imports", BulkImport, is_unfinished(BulkImport) & untouched),
    }


def add_samples(scale: int, settings: Settings, *, clean: bool = False) -> None:
    """Add *scale* times the usual sample data; if *clean*, nothing that batches warn about."""
    with err.status("adding sample data"):
        add_statuses(5_000 * scale)
        _add_refs(scale, settings, clean=clean)
        _put_all_but_one(add_artifacts(1_000 * scale), settings)
        _add_uploads(scale, settings, clean=clean)
        add_imports(200 * scale, clean=clean)


def fill_database(scale: int, *, json: bool) -> None:
    """Create the example forge's tables, and add the sample data of the command `seed`."""
    with connect_command("seed") as settings:
        require_redis()
        try:
            with database.atomic():
                acts.record_act("seed", "sample data", after={"scale": scale})
                make_tables(database.obj)
        except migrations.TableExists as error:
            raise Problem(f"{error}: this database belongs to a forge; use another database for sample data") from error
        if scale:
            add_samples(scale, settings)
        found = count_samples(settings).values()
    if json:
        print_json({there.description.replace(" ", "_"): {"total": there.total, "due": there.due} for there in found})
    else:
        rows = ((there.description, f"{there.total:,}", f"{there.due:,}") for there in found)
        print_table(("sample data", "total", "due"), rows)
