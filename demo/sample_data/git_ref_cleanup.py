"""Repositories half of whose merge requests are closed, and rows that ask to delete those refs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from demo import git_repositories
from demo.figures import Figure, Results, Sample, SampleData, processed
from forgekeeper.database import database
from forgekeeper.settings import Settings
from models import GitRefDeletion
from workers.git_ref_cleanup.deletions import waiting_projects
from workers.git_ref_cleanup.repositories import paths

TOTAL, REFS = 10, 100
REFUSED = ("HEAD", "main", "refs/heads/main", "refs/heads/a..b", "refs/heads/two\nlines", "refs/" + 1_020 * "x")
"""Refs that may not be deleted this way: they end as rejected, and stop no other."""

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
    made = add_projects(TOTAL * scale)
    refs = [f"refs/merge-requests/{n}/head" for n in range(REFS)]
    doomed = refs[: REFS // 2]
    _never_created, *existing = made.items()
    for _, disk_path in existing:
        git_repositories.create(root, disk_path, refs)
    nobody = max(made) + 1_000_000
    add_ref_deletions([*made, nobody], doomed)
    add_ref_deletions([existing[0][0]], REFUSED)
    return Sample("git refs", len(existing) * (REFS + 1), len(existing) * len(doomed))


def count(settings: Settings) -> Sample:
    root = settings.repositories_root
    if root is None:
        return Sample("git refs", 0, 0)
    wanted = {
        path: {row.ref for row in GitRefDeletion.pending().where(GitRefDeletion.project_id == number)} - {*REFUSED}
        for number, path in paths(waiting_projects(after=0, limit=TOTAL)).items()
    }
    due = sum(len(git_repositories.refs(root / path) & refs) for path, refs in wanted.items())
    return Sample("git refs", git_repositories.count_refs(root), due)


def figures(before: Sample, _results: Results) -> Iterator[Figure]:
    closed = GitRefDeletion.select().count() - GitRefDeletion.pending().count()
    refused = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield processed("clean_project_refs", "git_ref_deletion", before.due)
    yield processed("clean_project_refs", "gone_ref_deletion", closed - len(REFUSED) - before.due)
    yield Figure("worker", "record_errors_total", refused, len(REFUSED))
    yield Figure("exporter", "backlog_records", refused, 0)
    yield Figure("exporter", "quarantine_records", {"record": "rejected_ref"}, len(REFUSED))


def add_projects(total: int) -> dict[int, str]:
    """Add *total* projects; return where the repository of each belongs, by its id."""
    return dict(database.execute_sql(PROJECTS, {"total": total}).fetchall())


def add_ref_deletions(projects: Sequence[int], refs: Sequence[str]) -> int:
    """Ask for the deletion of *refs* in each of *projects*; return how many rows there are."""
    count: int = database.execute_sql(REF_DELETIONS, {"projects": list(projects), "refs": list(refs)}).rowcount
    return count


SAMPLE_DATA = SampleData(add, count, figures)
