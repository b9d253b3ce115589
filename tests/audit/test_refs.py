"""What the audit knows of refs: said before git is asked, closed with their rows, and after a crash by the next child."""

from datetime import timedelta

import pytest

from forgekeeper.database import database, now
from forgekeeper.storage.git_repository import RepositoryFailed
from models import GitRefDeletion, Project
from tests.harness.audited import interrupted_at, lines, unclosed
from tests.harness.git_samples import Bare, put_root, stand_in
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.git_ref_cleanup import clean_project_refs

PROJECT = 7
RECORD = "git_ref_deletion"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    repository = Bare(root)
    repository.packed(*(f"refs/mr/{number}" for number in range(1, 7)))
    Project.create(id=PROJECT, disk_path=repository.disk_path)
    return repository


@pytest.fixture
def clean(root):
    """Do a child's work."""
    return lambda **options: perform(
        clean_project_refs, PROJECT, settings=settings_with(repositories_root=root, **options)
    )


def row(ref, **facts):
    return GitRefDeletion.create(project_id=PROJECT, ref=ref, **facts).id


def deleted():
    """The refs of which it is said that they were deleted."""
    return [line["ref"] for line in lines(RECORD) if line["state"] == "deleted"]


def test_each_deleted_ref_has_its_line(clean, repository):
    repository.loose("refs/mr/2", value=repository.two)
    since = now() - timedelta(hours=1)
    numbers = [row("refs/mr/1", created_at=since), row("refs/mr/2", created_at=since)]

    clean()

    facts = {"project_id": PROJECT, "due": since.isoformat(), "state": "deleted"}
    assert lines(RECORD) == [
        facts | {"id": numbers[0], "ref": "refs/mr/1", "oid": repository.one},
        facts | {"id": numbers[1], "ref": "refs/mr/2", "oid": repository.two},
    ]


@pytest.mark.parametrize("step", ["deleted", "settled"])
def test_what_a_crash_left_open_the_next_child_closes(clean, repository, step):
    row("refs/mr/1")
    with interrupted_at(f"clean_project_refs.{step}"):
        clean()

    clean()

    assert deleted() == ["refs/mr/1"]
    assert unclosed() == 0


def test_of_refs_that_a_crash_left_standing_it_is_said_that_they_were_kept(clean, repository, tmp_path, monkeypatch):
    row("refs/mr/1")
    row("refs/mr/2")
    with monkeypatch.context() as patched:
        stand_in(tmp_path / "bin", patched, 'case "$*" in *update-ref*) kill -9 $$;; esac; exec $GIT "$@"')
        with pytest.raises(RepositoryFailed):
            clean()
    (repository.path / "refs/mr").mkdir()
    (repository.path / "refs/mr/2").write_text(repository.two)

    clean()

    states = [(line["ref"], line["oid"], line["state"]) for line in lines(RECORD)]
    assert states == [
        ("refs/mr/1", repository.one, "kept"),
        ("refs/mr/2", repository.one, "moved"),
        ("refs/mr/1", repository.one, "deleted"),
        ("refs/mr/2", repository.two, "deleted"),
    ]
    assert unclosed() == 0


def test_a_ref_pushed_to_after_it_was_told_has_one_line_of_what_it_was_in_the_end(
    clean, repository, tmp_path, monkeypatch
):
    row("refs/mr/1")
    push = f"mkdir -p {repository.path}/refs/mr; [ -e $0.done ] || echo {repository.two} > {repository.path}/refs/mr/1"
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {push}; touch $0.done;; esac; exec $GIT "$@"')

    clean()

    assert [(line["oid"], line["state"]) for line in lines(RECORD)] == [
        (repository.one, "moved"),
        (repository.two, "deleted"),
    ]


def test_a_row_that_cannot_be_closed_keeps_its_ref_s_line(clean, repository):
    bad = row("refs/mr/1")
    row("refs/mr/2")
    refuse = f"begin if old.id = {bad} then raise 'no'; end if; return new; end"
    database.execute_sql(f"create function refuse() returns trigger language plpgsql as $$ {refuse} $$")
    database.execute_sql(
        "create trigger refuse before update on batched_git_ref_updates_deletions"
        " for each row execute function refuse()"
    )
    try:
        clean()
    finally:
        database.execute_sql("drop function refuse cascade")

    assert sorted(deleted()) == ["refs/mr/1", "refs/mr/2"]
    assert unclosed() == 0
