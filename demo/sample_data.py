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
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.terminal import Problem, emit, err, table
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.redis_register import RedisRegister
from forgekeeper.targets import stores
from forgekeeper.targets.git_command import Git, legible
from models import STALE_AFTER, BulkImport, GitRefDeletion, JobArtifact, Project, UserStatus, is_unfinished
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION, UPLOADS

PROJECTS, REFS = 10, 100
REFUSED = ("HEAD", "main", "refs/heads/main", "refs/heads/a..b", "refs/heads/two\nlines", "refs/" + 1_020 * "x")
"""Refs that must not be deleted this way: they end as rejected, and stop no other ref."""
REGISTER = RedisRegister(UPLOADS)
MALFORMED = ("no location at all", "artifacts:", "artifacts:../../etc/passwd")
"""Register entries that only a bug could write: they end as failed, and stop no others."""
GIT_TIMEOUT = 60.0
HISTORY = b"""\
commit refs/heads/main
committer Sample <sample@example.org> 1700000000 +0000
data 6
sample
"""
ADD_STATUSES = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""
ADD_PROJECTS = """
    insert into projects (id, disk_path)
    select first + n, format('sample/%%s.git', first + n)
    from (select coalesce(max(id), 0) + 1 as first from projects) as present, generate_series(0, %(total)s - 1) as n
    returning id, disk_path
"""
ADD_REF_DELETIONS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, ref from unnest(%(projects)s::bigint[]) as project_id, unnest(%(refs)s::text[]) as ref
"""
ADD_IMPORTS = """
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
TOUCH_IMPORTS = """
    with touched as (update bulk_imports set updated_at = now() where status in (0, 1))
    update bulk_import_entities set updated_at = now() where status in (0, 1)
"""
ADD_ARTIFACTS = """
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
ADD_STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, sum(size) from ci_job_artifacts group by project_id
    on conflict (project_id) do update set build_artifacts_size = excluded.build_artifacts_size
"""


class Sample(NamedTuple):
    """Sample data: description, total, and number of due records."""

    what: str
    total: int
    due: int


def _rows(what: str, model: type[pw.Model], due: pw.Node) -> Sample:
    return Sample(what, model.select().count(), model.select().where(due).count())


def add_statuses(total: int) -> None:
    """Add *total* statuses: of five, two are expired, two have time left, one never expires."""
    database.execute_sql(ADD_STATUSES, {"total": total})


def add_projects(total: int) -> dict[int, str]:
    """Add *total* projects; return the path of each repository by project id."""
    return dict(database.execute_sql(ADD_PROJECTS, {"total": total}).fetchall())


def add_ref_deletions(projects: Sequence[int], refs: Sequence[str]) -> None:
    """Request the deletion of *refs* in each of *projects*."""
    database.execute_sql(ADD_REF_DELETIONS, {"projects": list(projects), "refs": list(refs)})


def create_repository(root: Path, disk_path: str, refs: Sequence[str]) -> None:
    """Create a bare repository with the branch main and *refs*, all at one commit."""
    path = root / disk_path
    path.parent.mkdir(parents=True, exist_ok=True)
    branches = b"".join(b"reset %s\nfrom refs/heads/main\n" % ref.encode() for ref in refs)
    _git(path, "init", "--quiet", "--bare", "--template=", "--initial-branch=main")
    _git(path, "fast-import", "--quiet", given=HISTORY + branches)
    _git(path, "pack-refs", "--all")


def create_refs(path: Path, refs: Sequence[str]) -> None:
    """Add *refs* to the repository at *path*, at the commit of its branch main."""
    commands = "".join(f"create {ref} refs/heads/main\n" for ref in refs)
    _git(path, "update-ref", "--stdin", given=commands.encode())


def count_refs(root: Path) -> int:
    """Count the refs of all repositories below *root*."""
    return sum(len(refs_of(head.parent)) for head in root.rglob("HEAD"))


def refs_of(path: Path) -> set[str]:
    """Return the refs of the repository at *path*; none if it does not exist."""
    return set(_git(path, "for-each-ref", "--format=%(refname)").splitlines()) if path.exists() else set()


def _git(path: Path, *arguments: str, given: bytes = b"") -> str:
    answer = Git(path, until=time.monotonic() + GIT_TIMEOUT, grace=1.0).run(*arguments, given=given)
    if answer.code != 0:
        raise OSError(f"git {arguments[0]}: {legible(answer.complaint())}")
    return answer.out.decode()


def _add_refs(scale: int, settings: Settings, *, clean: bool) -> None:
    """Add projects with repositories and deletions of refs.

    Unless *clean*, also add a project without a repository, and bad deletions.
    """
    root = settings.repositories_root
    if root is None:
        return
    made = add_projects(PROJECTS * scale)
    refs = [f"refs/merge-requests/{n}/head" for n in range(REFS)]
    if clean:
        for path in made.values():
            create_repository(root, path, refs)
        add_ref_deletions([*made], refs[: REFS // 2])
        return
    _never_created, *existing = made
    for number in existing:
        create_repository(root, made[number], refs)
    nobody = max(made) + 1_000_000
    add_ref_deletions([*made, nobody], refs[: REFS // 2])
    add_ref_deletions(existing[:1], REFUSED)


def _refs(root: Path | None) -> Sample:
    if root is None:
        return Sample("git refs", 0, 0)
    pending = defaultdict[int, set[str]](set)
    for row in GitRefDeletion.pending():
        pending[row.project_id].add(row.ref)
    projects = Project.select().where(Project.id.in_(list(pending)))
    due = sum(len(refs_of(root / one.disk_path) & pending[one.id] - {*REFUSED}) for one in projects)
    return Sample("git refs", count_refs(root), due)


def add_imports(total: int, *, clean: bool = False) -> None:
    """Add *total* bulk imports with two entities of four trackers each.

    Unless *clean*, a fifth of the imports is stale.
    """
    database.execute_sql(ADD_IMPORTS, {"total": total})
    if clean:
        database.execute_sql(TOUCH_IMPORTS)


def add_artifacts(total: int) -> list[str]:
    """Add *total* job artifacts; return the paths of their objects.

    Of ten, six have expired; of the others one is locked, one has an unknown lock, one is a trace, one is kept by its
    user.
    """
    objects = [path for (path,) in database.execute_sql(ADD_ARTIFACTS, {"total": total}).fetchall()]
    database.execute_sql(ADD_STATISTICS)
    return objects


def _add_uploads(scale: int, settings: Settings, *, clean: bool) -> None:
    """Register stale and new uploads.

    *clean* stale uploads have been stale for a minute, others for a day. Unless *clean*, also register malformed
    entries.
    """
    total, location = 200 * scale, JobArtifact.location
    names = [f"uploads/{secrets.token_hex(4)}:{n}" for n in range(total)]
    stale, fresh = names[: total // 2], names[total // 2 :]
    malformed = () if clean else MALFORMED
    age = MAX_UPLOAD_DURATION + timedelta(minutes=1) if clean else timedelta(days=1)
    began = client.time()[0] - age.total_seconds()
    client.zadd(REGISTER.keys.pending, dict.fromkeys([*(f"{location}:{name}" for name in stale), *malformed], began))
    for name in fresh:
        REGISTER.prepare(client, location, name)
    _put_all_but_one(names, settings)


def _uploads() -> Sample:
    due = int(client.zcount(REGISTER.keys.pending, "-inf", int(client.time()[0]) - 3 * 3600))
    return Sample("direct uploads", REGISTER.count(client), due)


def _put_all_but_one(names: Sequence[str], settings: Settings) -> None:
    """Store the objects of artifacts or uploads, except the first, which never arrived."""
    store = stores.at(JobArtifact.location, settings)
    if store is not None:
        for name in names[1:]:
            obstore.put(store.store, name, b"a sample\n")


def count_samples(settings: Settings) -> dict[str, Sample]:
    """Count the present sample data by batch."""
    untouched = BulkImport.updated_at < now() - STALE_AFTER
    return {
        "user_status_cleanup": _rows("user statuses", UserStatus, UserStatus.clear_status_at <= now()),
        "git_ref_cleanup": _refs(settings.repositories_root),
        "expired_job_artifacts": _rows("job artifacts", JobArtifact, JobArtifact.is_expired(now())),
        "stale_direct_uploads": _uploads(),
        "stale_imports": _rows("bulk imports", BulkImport, is_unfinished(BulkImport) & untouched),
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
    with connected("seed") as settings:
        require_redis()
        try:
            with database.atomic():
                acts.record("seed", "sample data", after={"scale": scale})
                make_tables(database.obj)
        except migrations.TableExists as error:
            raise Problem(f"{error}: this database is a forge's own, sample data does not belong there") from error
        if scale:
            add_samples(scale, settings)
        found = count_samples(settings).values()
    if json:
        emit({there.what.replace(" ", "_"): {"total": there.total, "due": there.due} for there in found})
    else:
        rows = ((there.what, f"{there.total:,}", f"{there.due:,}") for there in found)
        table(("sample data", "total", "due"), rows)
