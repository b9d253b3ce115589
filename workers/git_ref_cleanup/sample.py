"""Sample data of batch 58: repositories half of whose merge requests are closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forgekeeper.brought import Figure, Results, Sample, processed
from forgekeeper.database import database
from forgekeeper.settings import Settings
from forgekeeper.storage import git_sample
from models import GitRefDeletion
from workers.git_ref_cleanup.deletions import waiting_projects
from workers.git_ref_cleanup.repositories import paths

TOTAL, REFS = 10, 100
REFUSED = ("HEAD", "main", "refs/heads/main", "refs/heads/a..b", "refs/heads/two\nlines", "refs/" + 1_020 * "x")
"""Refs that nobody may have deleted this way: they end as rejected, and stop no other."""

PROJECTS = """
    insert into projects (id, disk_path)
    select first + n, format('sample/%%s.git', first + n)
    from (select coalesce(max(id), 0) + 1 as first from projects) as present, generate_series(0, %(total)s - 1) as n
    returning id, disk_path
"""
REF_DELETIONS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, ref from unnest(%(projects)s::bigint[]) as project_id, unnest(%(refs)s::text[]) as ref
"""


def add(scale: int, settings: Settings) -> Sample:
    """Add projects with repositories, one of which was never created, and deletions, some of no project."""
    root = settings.repositories_root
    if root is None:
        return Sample("git refs", 0, 0)
    made = projects(TOTAL * scale)
    refs = [f"refs/merge-requests/{n}/head" for n in range(REFS)]
    doomed = refs[: REFS // 2]
    _never_created, *existing = made.items()
    for _, disk_path in existing:
        git_sample.create(root, disk_path, refs)
    nobody = max(made) + 1_000_000
    ref_deletions([*made, nobody], doomed)
    ref_deletions([existing[0][0]], REFUSED)
    return Sample("git refs", len(existing) * (REFS + 1), len(existing) * len(doomed))


def present(settings: Settings) -> Sample:
    """Count the refs, and those of them that pending rows name and that may go."""
    root = settings.repositories_root
    if root is None:
        return Sample("git refs", 0, 0)
    wanted = {
        path: {row.ref for row in GitRefDeletion.pending().where(GitRefDeletion.project_id == number)} - {*REFUSED}
        for number, path in paths(waiting_projects(after=0, limit=TOTAL)).items()
    }
    due = sum(len(git_sample.refs(root / path) & refs) for path, refs in wanted.items())
    return Sample("git refs", git_sample.count(root), due)


def proof(before: Sample, _results: Results) -> Iterator[Figure]:
    """Say what the pages of metrics show of it."""
    closed = GitRefDeletion.select().count() - GitRefDeletion.pending().count()
    refused = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield processed("clean_project_refs", "git_ref_deletion", before.due)
    yield processed("clean_project_refs", "gone_ref_deletion", closed - len(REFUSED) - before.due)
    yield Figure("worker", "record_errors_total", refused, len(REFUSED))
    yield Figure("exporter", "backlog_records", refused, 0)
    yield Figure("exporter", "quarantine_records", {"record": "rejected_ref"}, len(REFUSED))


def projects(total: int) -> dict[int, str]:
    """Add *total* projects; return where the repository of each belongs, by its id."""
    return dict(database.execute_sql(PROJECTS, {"total": total}).fetchall())


def ref_deletions(projects: Sequence[int], refs: Sequence[str]) -> int:
    """Ask for the deletion of *refs* in each of *projects*; return how many rows there are."""
    count: int = database.execute_sql(REF_DELETIONS, {"projects": list(projects), "refs": list(refs)}).rowcount
    return count
