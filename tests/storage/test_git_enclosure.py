"""What lies in a repository leads no deletion out of it, and what git only reads may lie anywhere."""

import shutil
import time

import pytest

from forgekeeper.storage.git_refs import (
    DEFAULT_BRANCH,
    DELETED,
    GONE,
    TOO_LONG_TO_LOCK,
    Doomed,
    RepositoryFailed,
    delete,
)
from forgekeeper.storage.git_repository import is_missing, misnamed, objection
from tests.harness.git_samples import ALWAYS_IN_TIME, Bare, put_root, stand_in


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    repository = Bare(root)
    repository.loose("refs/heads/a")
    return repository


@pytest.fixture
def other(root):
    """Another repository below the root; it loses nothing."""
    other = Bare(root, "group/other.git")
    other.loose("refs/heads/a", "refs/mr/1/a")
    other.packed("refs/heads/packed")
    before = {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()}
    yield other
    assert {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()} == before


def put_link(path, target):
    """Put a link to *target* where *path* was."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("link", "target", "ref"),
    [
        ("refs", "refs", "refs/heads/a"),
        ("refs/heads", "refs/heads", "refs/heads/a"),
        ("refs/mr", "refs/heads", "refs/mr/a"),
        ("refs/x/1", "refs/mr/1", "refs/x/1/a"),
        ("packed-refs", "packed-refs", "refs/heads/packed"),
        ("logs", "", "refs/heads/a"),
        ("logs/refs", "refs", "refs/heads/a"),
        ("logs/refs/heads", "refs/heads", "refs/heads/a"),
        ("logs/HEAD", "HEAD", "refs/heads/a"),
        ("reftable", "", "refs/heads/a"),
    ],
)
def test_a_link_that_git_would_delete_through_is_refused(repository, other, link, target, ref):
    put_link(repository.path / link, other.path / target)

    with pytest.raises(RepositoryFailed, match=f"^{link} is a symbolic link"):
        repository.delete(ref)


def test_refs_that_another_folder_has_are_refused(repository, other):
    (repository.path / "commondir").write_text(f"{other.path}\n")

    with pytest.raises(RepositoryFailed, match="commondir"):
        repository.delete("refs/heads/a", "refs/heads/packed")


@pytest.mark.parametrize("value", ["reftable:///srv/x", "files://x", "\\\n  files:///x", '"files:///x"'])
def test_a_place_of_refs_that_only_a_later_git_knows_is_refused(repository, value):
    with (repository.path / "config").open("a") as config:
        config.write(f"[extensions]\n\tRefStorage = {value}\n")

    with pytest.raises(RepositoryFailed, match=r"extensions\.refStorage"):
        repository.delete("refs/heads/a")


def test_a_link_into_the_repository_itself_is_no_way_around_the_default_branch(repository):
    put_link(repository.path / "refs/alias", repository.path / "refs/heads")

    with pytest.raises(RepositoryFailed, match="refs/alias"):
        repository.delete("refs/alias/main")

    assert "refs/heads/main" in repository.refs()


def test_refs_behind_a_link_are_not_taken_for_gone(repository, tmp_path):
    put_link(repository.path / "refs/heads", tmp_path / "not mounted")

    with pytest.raises(RepositoryFailed, match="refs/heads"):
        repository.delete("refs/heads/a")


def test_a_link_that_comes_between_look_and_deletion_is_refused(repository, other, tmp_path, monkeypatch):
    heads = repository.path / "refs/heads"
    swap = f"rm -rf {heads}; ln -s {other.path}/refs/heads {heads}"
    stand_in(tmp_path / "bin", monkeypatch, f'$GIT "$@"; case "$*" in *for-each-ref*) {swap};; esac')

    with pytest.raises(RepositoryFailed, match="refs/heads"):
        repository.delete("refs/heads/a")


def test_a_link_that_no_doomed_ref_lies_behind_is_in_nobody_s_way(repository, other):
    put_link(repository.path / "refs/theirs", other.path / "refs/heads")

    assert repository.states("refs/heads/a") == {"refs/heads/a": "deleted"}


def test_a_loose_ref_that_is_a_link_goes_and_what_it_leads_to_stays(repository, other):
    put_link(repository.path / "refs/heads/link", other.path / "refs/heads/a")

    assert repository.states("refs/heads/link") == {"refs/heads/link": "deleted"}
    assert not (repository.path / "refs/heads/link").is_symlink()


def test_what_git_only_reads_may_lie_elsewhere(repository, other):
    put_link(repository.path / "HEAD", "refs/heads/main")
    put_link(repository.path / "objects", other.path / "objects")
    assert repository.delete("refs/heads/a", "refs/heads/main") == {
        Doomed("refs/heads/a"): DELETED,
        Doomed("refs/heads/main"): DEFAULT_BRANCH,
    }


def test_objects_may_come_from_a_pool(repository, other):
    (repository.path / "objects/info").mkdir(exist_ok=True)
    (repository.path / "objects/info/alternates").write_text(f"{other.path}/objects\n")

    assert repository.delete("refs/heads/a") == {Doomed("refs/heads/a"): DELETED}


@pytest.mark.parametrize(
    "config",
    [
        "[core]\n\tfsmonitor = {trap}\n\tsshCommand = {trap}\n\tpager = {trap}\n\teditor = {trap}\n",
        "[core]\n\talternateRefsCommand = {trap}\n\thooksPath = {hooks}\n",
        "[include]\n\tpath = {included}\n",
        '[extensions]\n\tpartialClone = far\n[remote "far"]\n\tpromisor = true\n\turl = ext::{trap}\n',
        "[alias]\n\tupdate-ref = !{trap}\n\tfor-each-ref = !{trap}\n[pager]\n\tfor-each-ref = {trap}\n",
    ],
)
def test_no_program_that_the_repository_names_is_run(repository, tmp_path, config):
    hooks, trap, included = tmp_path / "hooks", tmp_path / "trap", tmp_path / "included"
    hooks.mkdir()
    for program in (trap, hooks / "reference-transaction"):
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        program.chmod(0o755)
    included.write_text(f"[core]\n\thooksPath = {hooks}\n\tfsmonitor = {trap}\n")
    repository.loose("refs/heads/lacks", value="1" * 40)
    with (repository.path / "config").open("a") as file:
        file.write(config.format(trap=trap, hooks=hooks, included=included))

    assert repository.states("refs/heads/a", "refs/heads/gone")["refs/heads/a"] == "deleted"
    assert not (tmp_path / "ran").exists()


def packed(repository, *names):
    repository.packed(*names)
    return [Doomed(name) for name in names]


@pytest.mark.parametrize("length", [251, 252, 255, 256, 300])
def test_a_ref_that_is_too_long_for_a_lock_is_rejected_and_keeps_no_other(repository, length):
    names = [f"refs/heads/{'x' * length}", f"refs/heads/{'é' * (length // 2 + 1)}", "refs/heads/" + "y" * 250]
    long, letters, fits = packed(repository, *names)

    outcomes = repository.delete(long, letters, fits, "refs/heads/" + "z" * length)

    assert [outcomes[one] for one in (long, letters, fits)] == [TOO_LONG_TO_LOCK, TOO_LONG_TO_LOCK, DELETED]
    assert outcomes[Doomed("refs/heads/" + "z" * length)] == GONE
    assert set(repository.refs()) == {"refs/heads/a", "refs/heads/main", long.ref, letters.ref}


def test_a_folder_may_have_a_longer_name_than_a_ref(repository):
    inside = f"refs/{'x' * 255}/a"
    outside = f"refs/{'x' * 256}/a"

    outcomes = repository.delete(*packed(repository, inside, outside))

    assert outcomes == {Doomed(inside): DELETED, Doomed(outside): TOO_LONG_TO_LOCK}


def of_length(total):
    """Return a name of that many bytes; of letters of four bytes, as there may be only so many."""
    name = "refs/"
    while (left := total - len(name.encode())) > 250:
        name += "😀" * 50 + "/"
    return name + "😀" * (left // 4) + "x" * (left % 4)


def test_a_path_that_is_too_long_for_a_lock_is_rejected(repository):
    longest = 4_096 - len(f"{repository.path}/.lock\0")
    names = [of_length(longest + more) for more in (-1, 0, 1, 2)]

    outcomes = repository.delete(*packed(repository, *names))

    assert [outcomes[Doomed(name)] for name in names] == [DELETED, DELETED, TOO_LONG_TO_LOCK, TOO_LONG_TO_LOCK]


def test_hundreds_that_are_too_long_for_a_lock_cost_no_refusal(repository):
    doomed = packed(repository, *(f"refs/heads/{'x' * 252}{number:03}" for number in range(300)))

    assert set(repository.delete(*doomed).values()) == {TOO_LONG_TO_LOCK}


def test_a_lock_that_a_file_system_has_no_name_for_is_understood(repository, tmp_path, monkeypatch):
    repository.loose("refs/b")
    said = "fatal: prepare: cannot lock ref 'refs/b': Unable to create '/x/refs/b.lock': File name too long"
    script = f'case "$*" in *update-ref*) grep -q refs/b && {{ echo "{said}" >&2; exit 128; }};; esac; exec $GIT "$@"'
    stand_in(tmp_path / "bin", monkeypatch, script)

    assert repository.delete("refs/b") == {Doomed("refs/b"): TOO_LONG_TO_LOCK}


@pytest.mark.parametrize(
    "disk_path",
    ["x" * 5_000, "x" * 256, "x" * 252, "/".join(["y" * 200] * 24), "y/" * 3_000, "a\nb", "loop/x", "file/x"],
)
def test_of_any_path_it_can_be_said_whether_there_is_a_repository(root, disk_path):
    (root / "loop").symlink_to("loop")
    (root / "file").touch()

    missing = is_missing(root, disk_path)

    assert missing == (disk_path in {"x" * 252, "a\nb", "file/x"})
    assert misnamed(root, disk_path) is None


@pytest.mark.parametrize("disk_path", ["x" * 5_000, "x" * 256, "/".join(["y" * 200] * 24)])
def test_a_path_that_is_too_long_is_a_sentence(root, disk_path):
    with pytest.raises(RepositoryFailed, match="cannot be followed: File name too long"):
        delete(root, disk_path, [Doomed("refs/c")], until=time.monotonic() + ALWAYS_IN_TIME)


def test_who_asks_is_told_what_a_deletion_would_be_refused_for(repository, other):
    put_link(repository.path / "packed-refs", other.path / "packed-refs")

    assert objection(repository.root, repository.disk_path).startswith("packed-refs is a symbolic link")
    assert objection(other.root, other.disk_path) is None
    assert objection(other.root, "nothing/there") is None
    assert "too long" in objection(other.root, "x" * 5_000)
