"""Refs are deleted in bulk: exactly those that may go, whatever else is among them."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forgekeeper.storage import git_refs, git_values
from forgekeeper.storage.git_command import Git
from forgekeeper.storage.git_refs import DELETED, GONE, MOVED, Doomed, GitUnavailable, Outcome
from forgekeeper.storage.git_repository import open_repository
from tests.harness.git_samples import ALWAYS_IN_TIME, Bare, Held, put_root, stand_in
from tests.harness.waiting import wait_until

ELSEWHERE = "1" * 40
PLAIN = ["refs/a/plain", "refs/a/again"]
FILES = {
    "refs/a/broken": "no oid",
    "refs/a/null": "0" * 40,
    "refs/a/nothing": "0" * 64,
    "refs/a/short": "1" * 39,
    "refs/a/of/sha1": "1" * 40,
    "refs/a/of/sha256": "1" * 64,
    "refs/a/symbolic": "ref: refs/a/plain",
    "refs/a/leads/nowhere": "ref: refs/a/none",
    "refs/a/more": "1" * 40 + " and more",
}
# For a stand-in of git that has put its input aside.
REFUSE = '[ -z "$stuck" ] || { echo "%s" >&2; exit 128; }'
GO_ON = 'exec $GIT "$@" < $0.in'


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    return Bare(root)


def test_loose_and_packed_refs_are_deleted_and_no_others(repository):
    repository.packed("refs/mr/1/head", "refs/mr/2/head", "refs/mr/3/head", "refs/both")
    repository.loose("refs/keep/1", "refs/keep/2", "refs/both")

    states = repository.states("refs/mr/1/head", "refs/mr/3/head", "refs/keep/1", "refs/both")

    assert set(states.values()) == {"deleted"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/mr/2/head", "refs/keep/2"}
    repository.fsck()


def test_nothing_doomed_asks_nothing_of_anybody(tmp_path):
    assert Bare.delete(type("Nowhere", (), {"root": tmp_path, "disk_path": "x"})) == {}


def test_a_ref_that_is_gone_is_gone(repository):
    assert repository.delete("refs/x", Doomed("refs/y", repository.one)) == {
        Doomed("refs/x"): GONE,
        Doomed("refs/y", repository.one): GONE,
    }


@pytest.mark.parametrize("store", ["loose", "packed"])
def test_a_ref_that_cannot_exist_beside_another_is_gone(repository, store):
    getattr(repository, store)("refs/mr/1", "refs/mr/2/head", "refs/mr/3")

    states = repository.states("refs/mr/1/head", "refs/mr/2", Doomed("refs/mr/2/head/x", repository.one), "refs/mr/3")

    assert states == {
        "refs/mr/1/head": "gone",
        "refs/mr/2": "gone",
        "refs/mr/2/head/x": "gone",
        "refs/mr/3": "deleted",
    }
    assert set(repository.refs()) == {"refs/heads/main", "refs/mr/1", "refs/mr/2/head"}


STRAYS = {"a ref": None, "a link to another ref": "ref: refs/heads/main", "no oid": "junk", "nothing": ""}


@pytest.mark.parametrize("oid", [None, "one"])
@pytest.mark.parametrize("before", [None, lambda _going: None], ids=["untold", "told"])
@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_a_ref_that_another_stands_in_the_way_of_is_refused_and_never_taken_for_gone(repository, stray, before, oid):
    repository.packed("refs/mr/7/head", "refs/mr/8/head")
    repository.loose("refs/mr/7", value=stray)
    row = Doomed("refs/mr/7/head", oid and repository.one)

    outcomes = repository.delete(row, "refs/mr/8/head", before=before)

    assert outcomes == {row: git_refs.behind(b"refs/mr/7"), Doomed("refs/mr/8/head"): DELETED}
    assert outcomes[row].state == "rejected"
    assert "refs/mr/7/head" in repository.refs()


def test_a_ref_that_a_doomed_one_stands_in_the_way_of_waits_for_that_and_goes_next(repository):
    repository.packed("refs/mr/7/head")
    repository.loose("refs/mr/7")
    rows = ["refs/mr/7/head", "refs/mr/7"]

    assert repository.states(*rows) == {"refs/mr/7": "deleted", "refs/mr/7/head": "locked"}
    assert repository.states(*rows) == {"refs/mr/7": "gone", "refs/mr/7/head": "deleted"}


def test_a_thousand_refs_that_others_stand_in_the_way_of_keep_no_other(repository):
    names = [f"refs/mr/{number}/head" for number in range(1_000)]
    repository.packed(*names, "refs/other")
    repository.loose(*(name.removesuffix("/head") for name in names))

    states = repository.states(*names, "refs/other")

    assert states.pop("refs/other") == "deleted"
    assert set(states.values()) == {"rejected"}


GONE_BY_WORD = [
    "unable to resolve reference 'refs/mr/7'",
    "'refs/mr' exists; cannot create 'refs/mr/7'",
    "is at 1111111111111111111111111111111111111111 but expected 2222222222222222222222222222222222222222",
]


@pytest.mark.parametrize("said", GONE_BY_WORD)
def test_what_git_takes_for_gone_and_the_next_look_still_sees_is_tried_again_and_stays_pending(
    repository, said, tmp_path, monkeypatch
):
    repository.packed("refs/mr/7", "refs/mr/8")
    complaint = f"fatal: prepare: cannot lock ref 'refs/mr/7': {said}"
    script = f'! grep -qa refs/mr/7 $0.in || {{ echo "{complaint}" >&2; exit 128; }}'
    stand_in(tmp_path / "bin", monkeypatch, f'cat > $0.in; case "$*" in *update-ref*) {script};; esac; {GO_ON}')

    states = repository.states("refs/mr/7", "refs/mr/8")

    assert states == {"refs/mr/7": "locked", "refs/mr/8": "deleted"}
    assert "refs/mr/7" in repository.refs()


def seen(repository, *names):
    git = Git(repository.path, time.monotonic() + ALWAYS_IN_TIME, 5.0)
    opened = open_repository(repository.root, repository.disk_path)
    return git_values.look(git, opened, sorted(name.encode() for name in names))


@pytest.mark.parametrize("oids", ["sha1", "sha256"])
def test_many_refs_are_seen_as_git_sees_them_whatever_their_files_say(root, oids, monkeypatch):
    repository = Bare(root, "group/project.git", f"--object-format={oids}")
    repository.packed("refs/a/packed", "refs/a/plain")
    repository.loose(*PLAIN, value=repository.two)
    for name, value in FILES.items():
        repository.loose(name, value=value)
    (repository.path / "refs/a/capital").write_text(f"{repository.two.upper()}\n")
    (repository.path / "refs/a/unterminated").write_text(repository.two)
    (repository.path / "refs/a/link").symlink_to("plain")
    others = ["refs/a", "refs/a/gone", "refs/a/packed", "refs/a/capital", "refs/a/unterminated", "refs/a/link"]
    by_git = seen(repository, *PLAIN, *FILES, *others)

    monkeypatch.setattr(git_values, "PATTERNS", 1)

    assert seen(repository, *PLAIN, *FILES, *others) == by_git
    assert {name.encode() for name in PLAIN} < by_git.oids.keys()
    assert {b"refs/a/broken", b"refs/a/null"} < by_git.broken


def test_many_loose_refs_are_read_once_and_not_all_of_their_folder_by_each_look(repository, tmp_path, monkeypatch):
    names = [f"refs/keep/{number}" for number in range(git_values.PATTERNS + 1)]
    repository.loose(*names)
    looks = tmp_path / "looks"
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *for-each-ref*) echo "$@" > {looks};; esac; exec $GIT "$@"')

    assert set(repository.states(*names).values()) == {"deleted"}
    assert not looks.exists()


@pytest.mark.parametrize("script", ["", 'case "$*" in *show-object-format*) exit 129;; esac; '])
def test_what_keeps_its_refs_elsewhere_or_in_an_unknown_format_is_seen_by_git_alone(
    repository, tmp_path, monkeypatch, script
):
    names = [f"refs/keep/{number}" for number in range(git_values.PATTERNS + 1)]
    repository.loose(*names)
    if not script:
        (repository.path / "reftable").mkdir()
    looks = tmp_path / "looks"
    stand_in(
        tmp_path / "bin", monkeypatch, f'{script}case "$*" in *for-each-ref*) echo >> {looks};; esac; exec $GIT "$@"'
    )

    assert len(seen(repository, *names).oids) == len(names)
    assert looks.read_text() == "\n\n"


def open_files():
    """What this process has open."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield link.readlink()


def test_a_folder_in_the_place_of_a_ref_leaves_no_file_open(repository):
    repository.loose("refs/a/b")
    opened = open_repository(repository.root, repository.disk_path)

    assert opened.file(b"refs/a") is None
    assert repository.path / "refs/a" not in set(open_files())


def test_many_refs_that_cannot_exist_are_no_more_trouble_than_one(repository):
    repository.loose(*[f"refs/folder/{number}/head" for number in range(100)])
    repository.loose(*[f"refs/file/{number}" for number in range(100)])

    states = repository.states(
        *[f"refs/folder/{number}" for number in range(100)], *[f"refs/file/{number}/head" for number in range(100)]
    )

    assert set(states.values()) == {"gone"}


def test_refs_of_which_only_one_can_exist_go_together(repository):
    repository.loose("refs/mr/1/head")

    states = repository.states("refs/mr/1", "refs/mr/1/head", "refs/mr/1/head/x")

    assert states == {"refs/mr/1": "gone", "refs/mr/1/head": "deleted", "refs/mr/1/head/x": "gone"}


@pytest.mark.parametrize("name", ["refs/heads/refs/x", "refs/tags/refs/x", "refs/refs/x"])
def test_a_ref_is_not_taken_for_one_whose_name_ends_like_it(repository, name):
    repository.loose(name)

    assert repository.states("refs/x") == {"refs/x": "gone"}
    assert name in repository.refs()


def test_a_ref_that_has_moved_stays(repository):
    repository.loose("refs/a", "refs/b", value=repository.two)

    outcomes = repository.delete(Doomed("refs/a", repository.one), Doomed("refs/b", repository.two))

    assert list(outcomes.values()) == [MOVED, DELETED]
    assert repository.refs()["refs/a"] == repository.two


@pytest.mark.parametrize(
    "oid", ["", "0" * 40, "0" * 64, "junk", "x" * 40, "HEAD", " ", "\0", "\ud800", "ü" * 40, "1" * 39, "1" * 64]
)
def test_what_no_ref_can_be_at_has_moved(repository, oid):
    repository.loose("refs/a", "refs/b")

    outcomes = repository.delete(Doomed("refs/a", oid), "refs/b")

    assert outcomes == {Doomed("refs/a", oid): MOVED, Doomed("refs/b"): DELETED}


def test_the_beginning_of_an_oid_is_not_enough(repository):
    repository.loose("refs/a")

    assert repository.delete(Doomed("refs/a", repository.one[:20])) == {Doomed("refs/a", repository.one[:20]): MOVED}


def test_capital_letters_are_the_same_oid(repository):
    repository.loose("refs/a")

    assert repository.states(Doomed("refs/a", repository.one.upper())) == {"refs/a": "deleted"}


def test_a_repository_of_longer_oids_is_the_same(root):
    repository = Bare(root, "long.git", "--object-format=sha256")
    repository.packed("refs/a", "refs/b", "refs/c")

    states = repository.states(
        Doomed("refs/a", repository.one), Doomed("refs/b", repository.two), Doomed("refs/c", repository.one[:40])
    )

    assert len(repository.one) == 64
    assert states == {"refs/a": "deleted", "refs/b": "moved", "refs/c": "moved"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/b", "refs/c"}


def test_without_an_expectation_a_ref_goes_whatever_it_is(repository):
    repository.loose("refs/no/object", value=ELSEWHERE)

    assert repository.states("refs/no/object") == {"refs/no/object": "deleted"}


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_push_between_look_and_deletion_wins(repository, at_once, monkeypatch):
    monkeypatch.setattr(git_values, "PATTERNS", at_once)
    repository.loose("refs/a", "refs/b", "refs/c", "refs/d")
    held = repository.path / "refs/b.lock"
    held.touch()
    rows = [Doomed(f"refs/{letter}", repository.one) for letter in "abcd"]

    deletion = Held(lambda: repository.delete(*rows))
    # Git locks the refs in this order, and waits for the second.
    assert wait_until((repository.path / "refs/a.lock").exists, ALWAYS_IN_TIME)
    repository.loose("refs/c", value=repository.two)
    (repository.path / "refs/d").unlink()
    held.unlink()

    assert deletion.result() == {rows[0]: DELETED, rows[1]: DELETED, rows[2]: MOVED, rows[3]: GONE}
    assert repository.refs() == {"refs/heads/main": repository.one, "refs/c": repository.two}


def test_a_ref_that_became_a_folder_between_look_and_deletion_is_gone(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    held = repository.path / "refs/b.lock"
    held.touch()

    deletion = Held(lambda: repository.states("refs/a", "refs/b", "refs/c"))
    assert wait_until((repository.path / "refs/a.lock").exists, ALWAYS_IN_TIME)
    (repository.path / "refs/c").unlink()
    repository.loose("refs/c/x")
    held.unlink()

    assert deletion.result() == {"refs/a": "deleted", "refs/b": "deleted", "refs/c": "gone"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/c/x"}


def test_rows_with_the_same_ref_are_each_judged_by_their_own_expectation(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    rows = [
        *(Doomed("refs/a"), Doomed("refs/a"), Doomed("refs/a", repository.two), Doomed("refs/a", repository.one)),
        *(Doomed("refs/b", repository.two), Doomed("refs/b", ELSEWHERE)),
        *(Doomed("refs/c", repository.two), Doomed("refs/c", repository.one)),
        *(Doomed("refs/gone", repository.two), Doomed("refs/gone")),
    ]

    outcomes = repository.delete(*rows)

    assert [outcomes[row].state for row in rows] == [
        *("deleted", "deleted", "moved", "deleted"),
        *("moved", "moved"),
        *("moved", "deleted"),
        *("gone", "gone"),
    ]
    assert set(repository.refs()) == {"refs/heads/main", "refs/b"}


def test_a_symbolic_ref_goes_and_its_target_stays(repository):
    repository.loose("refs/target")
    repository.git("symbolic-ref", "refs/sym/1", "refs/target")
    repository.git("symbolic-ref", "refs/sym/2", "refs/target")
    repository.git("symbolic-ref", "refs/sym/3", "refs/target")

    states = repository.states("refs/sym/1", Doomed("refs/sym/2", repository.one), Doomed("refs/sym/3", repository.two))

    assert states == {"refs/sym/1": "deleted", "refs/sym/2": "deleted", "refs/sym/3": "moved"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/target", "refs/sym/3"}


@pytest.mark.parametrize("target", ["refs/nowhere", "refs/sym/1", "nonsense", "refs/broken"])
def test_a_symbolic_ref_that_leads_nowhere_goes_and_is_never_what_anybody_expects(repository, target):
    repository.loose("refs/sym/1", "refs/sym/2", value=f"ref: {target}")
    repository.loose("refs/broken", value="")

    states = repository.states("refs/sym/1", Doomed("refs/sym/2", repository.one), "refs/heads/gone")

    assert states == {"refs/sym/1": "deleted", "refs/sym/2": "moved", "refs/heads/gone": "gone"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/sym/2", "refs/broken"}


def test_broken_refs_keep_no_other(repository):
    broken = [f"refs/broken/{number}" for number in range(100)]
    repository.loose(*broken[:50], value="")
    repository.loose(*broken[50:], value="junk")
    repository.loose("refs/a", "refs/z")

    states = repository.states("refs/a", *broken, Doomed(broken[0], repository.one), "refs/z")

    assert (states.pop("refs/a"), states.pop("refs/z")) == ("deleted", "deleted")
    assert set(states.values()) == {"locked"}
    assert set(repository.refs()) == {"refs/heads/main", *broken}


def test_a_ref_that_cannot_be_looked_at_is_not_believed_to_be_gone(repository, tmp_path, monkeypatch):
    repository.loose("refs/a")
    loop = f"ln -s loop {repository.path}/refs/loop"  # once the repository has been found to lead nowhere
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *symbolic-ref*) {loop};; esac; exec $GIT "$@"')

    outcomes = repository.delete("refs/a", "refs/loop/x")

    assert outcomes[Doomed("refs/a")] == DELETED
    assert outcomes[Doomed("refs/loop/x")].state == "locked"
    assert "symbolic links" in outcomes[Doomed("refs/loop/x")].reason


def test_refs_that_git_refuses_keep_no_other(repository, tmp_path, monkeypatch):
    stuck = [f"refs/b/{number}{'x' * 200}" for number in range(3)]
    repository.packed("refs/a", *stuck, "refs/z")
    said = "fatal: prepare: cannot lock ref '$stuck': Unable to create '/srv/$stuck.lock': Permission denied"
    refuse = f'stuck=$(tr "\\0" "\\n" < $0.in | sed -n "s/^delete refs.b/refs\\/b/p" | head -1); {REFUSE % said}'
    stand_in(tmp_path / "bin", monkeypatch, f'cat > $0.in; case "$*" in *update-ref*) {refuse};; esac; {GO_ON}')

    outcomes = repository.delete("refs/a", *stuck, "refs/z")

    assert outcomes.pop(Doomed("refs/a")) == outcomes.pop(Doomed("refs/z")) == DELETED
    assert {outcome.state for outcome in outcomes.values()} == {"locked"}
    reason = outcomes[Doomed(stuck[0])].reason
    assert reason.startswith("Unable to create")
    assert reason.endswith("Permission denied")
    assert len(reason) == 200


@pytest.mark.parametrize("exists", [True, False])
def test_the_default_branch_stays(repository, exists):
    repository.loose("refs/heads/other")
    if not exists:
        repository.git("symbolic-ref", "HEAD", "refs/heads/unborn")
    branch = "refs/heads/main" if exists else "refs/heads/unborn"

    outcomes = repository.delete(branch, Doomed(branch, repository.one), "refs/heads/other")

    assert outcomes == {
        Doomed(branch): Outcome("rejected", "default_branch"),
        Doomed(branch, repository.one): Outcome("rejected", "default_branch"),
        Doomed("refs/heads/other"): DELETED,
    }
    assert set(repository.refs()) == {"refs/heads/main"}


def test_a_default_branch_behind_another_name_stays_under_both(repository):
    repository.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    repository.git("symbolic-ref", "HEAD", "refs/heads/alias")

    assert set(repository.states("refs/heads/alias", "refs/heads/main").values()) == {"rejected"}


def test_under_a_detached_head_every_branch_may_go(repository):
    repository.git("update-ref", "--no-deref", "HEAD", repository.two)

    assert repository.states("refs/heads/main") == {"refs/heads/main": "deleted"}
    assert repository.git("rev-parse", "HEAD") == repository.two


def test_names_that_git_must_not_see_are_rejected_and_keep_no_other(repository):
    repository.loose("refs/a", "refs/z")
    (repository.path / "FETCH_HEAD").write_text(repository.one)
    bad = {
        "HEAD": "not_under_refs",
        "FETCH_HEAD": "not_under_refs",
        "main": "not_under_refs",
        "": "not_under_refs",
        "refs/heads/x\0refs/heads/main": "invalid_name",
        "refs/heads/x\ncreate refs/heads/evil HEAD": "invalid_name",
        "refs/../HEAD": "invalid_name",
        "refs/heads/\udcff": "invalid_name",
        "refs/".ljust(1_025, "x"): "too_long",
    }

    outcomes = repository.delete("refs/a", *bad, "refs/z")

    assert {name: outcomes[Doomed(name)] for name in bad} == {
        name: Outcome("rejected", reason) for name, reason in bad.items()
    }
    assert outcomes[Doomed("refs/a")] == outcomes[Doomed("refs/z")] == DELETED
    assert repository.refs() == {"refs/heads/main": repository.one}
    assert (repository.path / "HEAD").exists()
    assert (repository.path / "FETCH_HEAD").exists()


def test_any_letters_that_git_takes_are_taken(repository):
    names = ["refs/heads/ünï/文件/😀", "refs/heads/it's", "refs/heads/-d", 'refs/heads/"q"', "refs/heads/a\u2028b"]
    repository.loose(*names)

    assert set(repository.states(*names).values()) == {"deleted"}
    assert set(repository.refs()) == {"refs/heads/main"}


def test_a_name_that_no_file_can_have_is_gone(repository):
    assert set(repository.states("refs/heads/" + "x" * 300, "refs/" + "y/" * 500 + "y").values()) == {"gone"}


def test_names_of_the_greatest_length_go_in_one_call(repository):
    names = [f"refs/{number:03}/{'/'.join(['ü' * 100] * 9)}" for number in range(300)]
    repository.packed(*names)

    assert set(repository.states(*names).values()) == {"deleted"}


@pytest.mark.parametrize("hook", ["hooks", "elsewhere"])
def test_no_hook_runs(repository, tmp_path, hook):
    repository.loose("refs/a")
    hooks = repository.path / hook
    hooks.mkdir()
    repository.git("config", "core.hooksPath", hooks)
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    (hooks / "reference-transaction").chmod(0o755)

    assert repository.states("refs/a") == {"refs/a": "deleted"}
    assert not (tmp_path / "ran").exists()


def test_nothing_that_is_set_for_other_gits_counts(repository, tmp_path, monkeypatch):
    other = Bare(put_root(tmp_path / "other"))
    other.loose("refs/a")
    repository.loose("refs/a")
    (tmp_path / ".gitconfig").write_text("[core\nbroken")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(other.path))
    monkeypatch.setenv("GIT_COMMON_DIR", str(other.path))
    monkeypatch.setenv("GIT_NAMESPACE", "other")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "broken")
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")

    assert repository.states("refs/a") == {"refs/a": "deleted"}
    assert not (tmp_path / "trace").exists()
    monkeypatch.undo()
    assert "refs/a" in other.refs()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository away")
def test_whose_repository_it_is_does_not_matter(repository):
    repository.loose("refs/a")
    for path in [repository.path, *repository.path.rglob("*")]:
        os.chown(path, 65_534, 65_534)

    assert repository.states("refs/a") == {"refs/a": "deleted"}


def test_without_git_nothing_is_known(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GitUnavailable):
        repository.delete("refs/a")


def test_a_git_that_cannot_be_started_is_no_git(repository, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_bytes(b"\x7fELF")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    with pytest.raises(GitUnavailable):
        repository.delete("refs/a")


def test_a_complaint_that_names_no_ref_is_tracked_down(repository, monkeypatch, tmp_path):
    names = [f"refs/{number:03}" for number in range(200)]
    repository.packed(*names)
    stand_in(
        tmp_path / "bin",
        monkeypatch,
        """
        case "$*" in *update-ref*)
            cat > "$0.$$"
            grep -qa refs/123 "$0.$$" && { echo "fatal: \033[31mmysterious" >&2; exit 128; }
            exec $GIT "$@" < "$0.$$"
        esac
        exec $GIT "$@"
        """,
    )

    outcomes = repository.delete(*names)

    assert outcomes.pop(Doomed("refs/123")) == Outcome("locked", r"\x1b[31mmysterious")
    assert set(outcomes.values()) == {DELETED}
    assert set(repository.refs()) == {"refs/heads/main", "refs/123"}


def bad_rows(repository):
    """Spoil some refs; return rows for these and others, with the state that each must end in."""
    repository.loose("refs/bad/moved", value=repository.two)
    repository.loose("refs/bad/locked", "refs/bad/locked.lock", "refs/bad/file", "refs/bad/folder/x")
    repository.loose("refs/bad/broken", value="")
    repository.loose("refs/bad/symbolic", value="ref: refs/heads/main")
    repository.loose("refs/bad/dangling", value="ref: refs/heads/nowhere")
    return {
        Doomed("HEAD"): "rejected",
        Doomed("refs/bad/.."): "rejected",
        Doomed("refs/".ljust(2_000, "x")): "rejected",
        Doomed("refs/heads/main"): "rejected",
        Doomed("refs/bad/moved", repository.one): "moved",
        Doomed("refs/bad/locked"): "locked",
        Doomed("refs/bad/broken"): "locked",
        Doomed("refs/bad/file/x"): "gone",
        Doomed("refs/bad/folder"): "gone",
        Doomed("refs/bad/gone"): "gone",
        Doomed("refs/bad/gone", repository.one): "gone",
        Doomed("refs/bad/symbolic"): "deleted",
        Doomed("refs/bad/dangling"): "deleted",
    }


def test_ten_thousand_refs_of_a_hundred_thousand_go_in_one_transaction_whatever_is_among_them(
    root, fast_folder, monkeypatch
):
    repository = Bare(put_root(fast_folder / "root"))
    names = [f"refs/mr/{number}/head" for number in range(100_000)]
    repository.packed(*names)
    doomed = random.Random(58).sample(names, 10_000)
    states = bad_rows(repository) | {Doomed(name): "deleted" for name in doomed[::2]}
    states |= {Doomed(name, repository.one): "deleted" for name in doomed[1::2]}
    stand_in(
        fast_folder / "bin",
        monkeypatch,
        f"""
        before=$(stat -c %i {repository.path}/packed-refs)
        $GIT "$@"
        code=$?
        echo $before $(stat -c %i {repository.path}/packed-refs) "$@" >> {fast_folder}/calls
        exit $code
        """,
    )

    outcomes = repository.delete(*random.Random(1).sample(list(states), len(states)))

    assert {row: outcome.state for row, outcome in outcomes.items()} == states
    calls = [line.split() for line in (fast_folder / "calls").read_text().splitlines()]
    assert sum(before != after for before, after, *_call in calls) == 1
    # The first is refused because of the locked ref, and has written nothing.
    assert sum("update-ref" in call for call in calls) == 2
    left = repository.refs()
    assert {name for name in left if name.startswith("refs/mr/")} == set(names) - set(doomed)
    assert {name for name in left if not name.startswith("refs/mr/")} == {
        *("refs/heads/main", "refs/bad/moved", "refs/bad/locked", "refs/bad/locked.lock", "refs/bad/file"),
        *("refs/bad/folder/x", "refs/bad/broken"),
    }


def test_ten_thousand_refs_that_are_gone_ask_git_to_delete_nothing(repository):
    names = [f"refs/mr/{number}" for number in range(10_000)]
    repository.packed("refs/other")
    (repository.path / "packed-refs.lock").touch()

    states = repository.states(*names, *(f"{name}/head" for name in names), within=30)

    assert set(states.values()) == {"gone"}


def test_a_row_that_names_a_folder_of_a_hundred_thousand_refs_holds_nobody_up(repository):
    names = [f"refs/mr/{number}/head" for number in range(100_000)]
    repository.packed(*names)
    started = time.monotonic()

    states = repository.states("refs/mr", *names[:300:100])

    assert states.pop("refs/mr") == "gone"
    assert set(states.values()) == {"deleted"}
    assert time.monotonic() < started + ALWAYS_IN_TIME
