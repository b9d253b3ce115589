"""Locks of others, a git that hangs, and repositories and disks that are not there."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgekeeper.targets import git_command, git_repository
from forgekeeper.targets.git_command import Git, GitError, GitTimedOut
from forgekeeper.targets.git_refs import RefToDelete, delete_refs
from forgekeeper.targets.git_repository import RepositoryFailed, RepositoryMissing, open_repository
from tests.harness.git_samples import ALWAYS_IN_TIME, BareRepository, replace_git, shorten_lock_timeouts
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout, wait_until

TWO_HOURS = 7_200


@pytest.fixture
def repository(root):
    repository = BareRepository(root)
    repository.packed("refs/a", "refs/b")
    repository.loose("refs/c")
    return repository


def two_hours_ago(path):
    path.touch()
    os.utime(path, (path.stat().st_mtime - TWO_HOURS,) * 2)


@contextmanager
def prepared(repository, *names):
    """Let another git hold the locks for a deletion of *names*; in the end it gives up."""
    with subprocess.Popen(
        ["git", f"--git-dir={repository.path}", "update-ref", "--stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdin.write(b"start\n" + b"".join(b"delete %s\n" % name.encode() for name in names) + b"prepare\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"start: ok\n"
        assert other.stdout.readline() == b"prepare: ok\n"
        yield
        other.communicate()


@pytest.mark.parametrize("lock", ["packed-refs.lock", "packed-refs.new"])
def test_a_lock_of_all_refs_is_reported_with_its_age_and_left(repository, lock, monkeypatch):
    shorten_lock_timeouts(monkeypatch)
    before = repository.refs()
    two_hours_ago(repository.path / lock)

    with pytest.raises(RepositoryFailed) as caught:
        repository.delete("refs/a", "refs/c")

    assert str(caught.value).startswith(f"the lock {lock} exists, 2:00:")
    assert [path.name for path in repository.locks()] == [lock]
    assert repository.refs() == before


@whole_only
def test_pushes_meanwhile_are_neither_lost_nor_undone(root):
    repository = BareRepository(root)
    names = [f"refs/mr/{number}" for number in range(300)]
    pushed = [f"refs/pushed/{number}" for number in range(20)]
    repository.packed(*names)
    rows = [RefToDelete(name, repository.one) for name in names]

    def push():
        for name in [name for pair in zip(pushed, names, strict=False) for name in pair]:
            patience = ["-c", "core.packedRefsTimeout=10000", "-c", "core.filesRefLockTimeout=10000"]
            repository.git(*patience, "update-ref", name, repository.two)

    with ThreadPoolExecutor() as thread:
        pushing = thread.submit(push)
        while not pushing.done():
            repository.delete(*rows)
    pushing.result()
    repository.delete(*rows)

    kept = dict.fromkeys([*pushed, *names[: len(pushed)]], repository.two)
    assert repository.refs() == {"refs/heads/main": repository.one, **kept}


HANGING = """
case "$*" in *update-ref*)
    cd {path}
    trap '{at_term}' TERM
    echo $$ > pid
    touch packed-refs.lock refs/c.lock
    # A time that nobody waits for, in pieces after which the shell looks at its traps.
    while :; do sleep 0.05; done
esac
exec $GIT "$@"
"""
CLEAN_UP = "rm packed-refs.lock refs/c.lock; exit 143"


def hang(repository, folder, monkeypatch, *, at_term):
    replace_git(folder / "bin", monkeypatch, HANGING.format(path=repository.path, at_term=at_term))


@whole_only
def test_git_that_does_not_listen_is_killed(repository, tmp_path, monkeypatch):
    hang(repository, tmp_path, monkeypatch, at_term="")

    with pytest.raises(GitTimedOut) as caught:
        repository.delete("refs/a", "refs/c", within=scale_timeout(2), grace=0.5)

    assert "was killed" in str(caught.value)
    assert not Path("/proc", (repository.path / "pid").read_text().strip()).exists()
    assert len(repository.locks()) == 2


def test_a_killed_git_that_does_not_go_is_left_and_is_no_mere_lack_of_time(repository, tmp_path, monkeypatch):
    replace_git(tmp_path / "bin", monkeypatch, "exec sleep 30")
    # What waits for a disk that does not answer hears no signal.
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(git_command, "KILL_TIMEOUT_SECONDS", 0.01)

    with pytest.raises(GitError, match="survived SIGKILL") as caught:
        Git(repository.path, time.monotonic() + 1, grace=0.01).run("update-ref")

    process = caught.traceback[-1].locals["process"]
    process.kill()
    process.wait()
    assert not isinstance(caught.value, GitTimedOut)


def test_to_find_no_lock_nothing_is_written(repository, monkeypatch):
    monkeypatch.setattr(git_repository, "TemporaryFile", lambda **_: pytest.fail("a file was made"))

    assert open_repository(repository.root, repository.disk_path).read_file_age("packed-refs.lock") is None


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from forgekeeper.targets.git_refs import RefToDelete, delete_refs
# A shell lets what runs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
delete_refs(Path(sys.argv[1]), sys.argv[2], [RefToDelete("refs/c")], until=time.monotonic() + 60, grace=60)
"""


def is_asleep(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("S")


def test_ctrl_c_reaches_git_through_us_alone(repository, tmp_path, monkeypatch):
    hang(repository, tmp_path, monkeypatch, at_term=f"touch {tmp_path}/asked; {CLEAN_UP}")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, repository.root, repository.disk_path],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    # Git may be this far before we know that it has been started: only then do we wait for it.
    assert wait_until(lambda: len(repository.locks()) == 2 and is_asleep(process), ALWAYS_IN_TIME)

    os.killpg(process.pid, signal.SIGINT)

    assert b"KeyboardInterrupt" in process.communicate(timeout=ALWAYS_IN_TIME)[1]
    assert (tmp_path / "asked").exists()
    assert repository.locks() == []


def test_real_git_that_is_ended_while_it_waits_leaves_no_locks(repository, tmp_path, monkeypatch):
    # It waits for the lock of all refs, with one of its own in hand, for as long as it is let.
    replace_git(
        tmp_path / "bin",
        monkeypatch,
        """
        for word; do
            shift
            case "$word" in core.packedRefsTimeout=*) word=core.packedRefsTimeout=-1; esac
            set -- "$@" "$word"
        done
        exec $GIT "$@"
        """,
    )

    with prepared(repository, "refs/b"):
        with pytest.raises(GitTimedOut):
            repository.delete("refs/c", within=1)
        assert not (repository.path / "refs/c.lock").exists()

    assert repository.locks() == []


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("kill -KILL $$", "git was ended by signal 9"),
        (
            "echo \"fatal: cannot lock ref 'refs/a': Unable to create 'x': No space left on device\" >&2; exit 128",
            "space",
        ),
    ],
)
def test_what_concerns_all_refs_fails_the_repository_at_once(repository, tmp_path, monkeypatch, end, message):
    replace_git(
        tmp_path / "bin",
        monkeypatch,
        f'case "$*" in *update-ref*) echo x >> {tmp_path}/asked; {end}; esac\nexec $GIT "$@"',
    )

    with pytest.raises(RepositoryFailed, match=message):
        repository.delete("refs/a", "refs/b")

    assert (tmp_path / "asked").read_text() == "x\n"


def test_a_git_that_does_not_say_it_committed_has_not(repository, tmp_path, monkeypatch):
    replace_git(tmp_path / "bin", monkeypatch, 'case "$*" in *update-ref*) exit 0; esac\nexec $GIT "$@"')

    assert repository.states("refs/a") == {"refs/a": "locked"}


@pytest.fixture
def outside(tmp_path):
    outside = BareRepository(tmp_path / "outside")
    outside.loose("refs/c")
    yield outside
    assert "refs/c" in outside.refs()


@pytest.mark.parametrize(
    "disk_path",
    [
        "",
        ".",
        "..",
        "/",
        "../outside/group/project.git",
        "group/../../outside/group/project.git",
        "link",
        "link/project.git",
        "a\0b",
        "group/../group/project.git",
        "loop",
        "\ud800",
        "dangling",
        "file",
    ],
)
def test_a_path_that_leads_elsewhere_is_not_followed(repository, outside, disk_path):
    link = {"link": outside.path, "link/project.git": outside.path.parent}.get(disk_path)
    if link:
        (repository.root / "link").symlink_to(link)
    (repository.root / "loop").symlink_to("loop")
    (repository.root / "dangling").symlink_to("group/nothing")
    (repository.root / "file").write_text(f"gitdir: {outside.path}\n")

    with pytest.raises(RepositoryFailed, match="the path of the repository"):
        delete_refs(repository.root, disk_path, [RefToDelete("refs/c")], until=time.monotonic() + ALWAYS_IN_TIME)

    assert "refs/c" in repository.refs()


def test_a_path_that_cannot_be_followed_says_why(repository):
    with pytest.raises(RepositoryFailed, match="File name too long"):
        delete_refs(repository.root, "x" * 5_000, [RefToDelete("refs/c")], until=time.monotonic() + ALWAYS_IN_TIME)


@pytest.mark.parametrize("disk_path", ["never/there.git", "group/project.git/description/x", "group/none.git"])
def test_a_repository_that_is_not_there_is_missing(repository, disk_path):
    (repository.path / "description").touch()
    # Git would find this one, were it to look around.
    BareRepository(repository.root, "group/.git").loose("refs/c")

    with pytest.raises(RepositoryMissing):
        delete_refs(repository.root, disk_path, [RefToDelete("refs/c")], until=time.monotonic() + ALWAYS_IN_TIME)


def test_refs_are_not_gone_because_another_repository_took_the_place(repository, tmp_path, monkeypatch):
    repository.leave_format_to_git()
    other = BareRepository(tmp_path / "other")
    deed = f"mv {repository.path} {tmp_path}/away && mv {other.path} {repository.path}"
    replace_git(tmp_path / "bin", monkeypatch, f'case "$*" in *rev-parse*) {deed};; esac\nexec $GIT "$@"')

    with pytest.raises(RepositoryFailed, match="place"):
        repository.delete("refs/a")
