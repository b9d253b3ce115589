"""Refs are deleted in bulk: exactly those that may go, as they were told to be, whatever else is among them."""

import subprocess
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgekeeper.targets import git_command, git_repository
from forgekeeper.targets.git_command import Git
from forgekeeper.targets.git_refs import (
    DEFAULT_BRANCH,
    REF_CHANGED,
    REF_DELETED,
    REF_MISSING,
    REF_MOVED,
    ROW_CLOSED,
    RefOutcome,
    RefToDelete,
)
from tests.harness.git_samples import ALWAYS_IN_TIME, BareRepository, put_root, refuse_refs, replace_git
from tests.harness.thorough import examples, whole_only
from tests.harness.waiting import wait_until

ELSEWHERE = "1" * 40
NAME_CONFLICT = (
    "name_conflict: refs/mr/7 has a conflicting name; delete that ref, then run `forgekeeper quarantine retry`"
)
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

STRAYS = {"a ref": None, "a link to another ref": "ref: refs/heads/main", "no oid": "junk", "nothing": ""}


@pytest.mark.parametrize("oid", [None, "one"])
@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_a_ref_that_another_stands_in_the_way_of_is_refused_and_never_taken_for_gone(repository, stray, oid):
    repository.packed("refs/mr/7/head", "refs/mr/8/head")
    repository.loose("refs/mr/7", value=stray)
    row = RefToDelete("refs/mr/7/head", oid and repository.one)

    outcomes = repository.delete(row, "refs/mr/8/head")

    assert outcomes == {row: RefOutcome("rejected", NAME_CONFLICT), RefToDelete("refs/mr/8/head"): REF_DELETED}
    assert outcomes[row].state == "rejected"
    assert "refs/mr/7/head" in repository.refs()


def test_a_ref_that_a_doomed_one_stands_in_the_way_of_waits_for_that_and_goes_next(repository):
    repository.packed("refs/mr/7/head")
    repository.loose("refs/mr/7")
    rows = ["refs/mr/7/head", "refs/mr/7"]

    assert repository.states(*rows) == {"refs/mr/7": "deleted", "refs/mr/7/head": "locked"}
    assert repository.states(*rows) == {"refs/mr/7": "gone", "refs/mr/7/head": "deleted"}


def seen(repository, *names):
    git = Git(repository.path, time.monotonic() + ALWAYS_IN_TIME, 5.0)
    opened = git_repository.open_repository(repository.root, repository.disk_path)
    return git_repository.read_refs(git, opened, sorted(name.encode() for name in names))


@pytest.mark.parametrize("oids", ["sha1", "sha256"])
def test_many_refs_are_seen_as_git_sees_them_whatever_their_files_say(root, oids, monkeypatch):
    repository = BareRepository(root, "group/project.git", f"--object-format={oids}")
    repository.packed("refs/a/packed", "refs/a/plain")
    repository.loose(*PLAIN, value=repository.two)
    for name, value in FILES.items():
        repository.loose(name, value=value)
    (repository.path / "refs/a/capital").write_text(f"{repository.two.upper()}\n")
    (repository.path / "refs/a/unterminated").write_text(repository.two)
    (repository.path / "refs/a/link").symlink_to("plain")
    others = ["refs/a", "refs/a/gone", "refs/a/packed", "refs/a/capital", "refs/a/unterminated", "refs/a/link"]
    by_git = seen(repository, *PLAIN, *FILES, *others)

    monkeypatch.setattr(git_repository, "MAX_NAMES_PER_LISTING", 1)

    assert seen(repository, *PLAIN, *FILES, *others) == by_git
    assert {name.encode() for name in PLAIN} < by_git.oids.keys()
    assert {b"refs/a/broken", b"refs/a/null"} < by_git.broken


def test_refs_are_seen_in_every_block_of_packed_refs(repository, monkeypatch):
    names = [f"refs/a/{number:03}" for number in range(100)]
    repository.packed(*names)
    file = repository.path / "packed-refs"
    # The second line of an annotated tag has no name.
    file.write_text("".join(f"{line}\n^{repository.two}\n" for line in file.read_text().splitlines()[1:]))
    monkeypatch.setattr(git_repository, "_PACKED_BLOCK_BYTES", 200)
    opened = git_repository.open_repository(repository.root, repository.disk_path)

    lines = opened.find_packed_lines([name.encode() for name in [*names, "refs/a/0990", "refs/b"]])

    assert dict(lines) == {name.encode(): f"{repository.one} {name}\n".encode() for name in names}


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_push_between_look_and_deletion_wins(repository, at_once, monkeypatch):
    monkeypatch.setattr(git_repository, "MAX_NAMES_PER_LISTING", at_once)
    # It waits for as long as the push takes here.
    patiently = [word.replace("filesRefLockTimeout=1000", "filesRefLockTimeout=60000") for word in git_command._OPTIONS]
    monkeypatch.setattr(git_command, "_OPTIONS", patiently)
    repository.loose("refs/a", "refs/b", "refs/c", "refs/d")
    held = repository.path / "refs/b.lock"
    held.touch()
    rows = [RefToDelete(f"refs/{letter}", repository.one) for letter in "abcd"]

    with ThreadPoolExecutor() as thread:
        deletion = thread.submit(repository.delete, *rows)
        # Git locks the refs in this order, and waits for the second.
        assert wait_until((repository.path / "refs/a.lock").exists, ALWAYS_IN_TIME)
        repository.loose("refs/c", value=repository.two)
        (repository.path / "refs/d").unlink()
        held.unlink()

    assert deletion.result() == {rows[0]: REF_DELETED, rows[1]: REF_DELETED, rows[2]: REF_MOVED, rows[3]: REF_MISSING}
    assert repository.refs() == {"refs/heads/main": repository.one, "refs/c": repository.two}


def test_rows_with_the_same_ref_are_each_judged_by_their_own_expectation(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    rows = [
        *(
            RefToDelete("refs/a"),
            RefToDelete("refs/a"),
            RefToDelete("refs/a", repository.two),
            RefToDelete("refs/a", repository.one),
        ),
        *(RefToDelete("refs/b", repository.two), RefToDelete("refs/b", ELSEWHERE)),
        *(RefToDelete("refs/c", repository.two), RefToDelete("refs/c", repository.one)),
        *(RefToDelete("refs/gone", repository.two), RefToDelete("refs/gone")),
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

    states = repository.states(
        "refs/sym/1", RefToDelete("refs/sym/2", repository.one), RefToDelete("refs/sym/3", repository.two)
    )

    assert states == {"refs/sym/1": "deleted", "refs/sym/2": "deleted", "refs/sym/3": "moved"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/target", "refs/sym/3"}


@pytest.mark.parametrize("target", ["refs/nowhere", "refs/sym/1", "nonsense", "refs/broken"])
def test_a_symbolic_ref_that_leads_nowhere_goes_and_is_never_what_anybody_expects(repository, target):
    repository.loose("refs/sym/1", "refs/sym/2", value=f"ref: {target}")
    repository.loose("refs/broken", value="")

    states = repository.states("refs/sym/1", RefToDelete("refs/sym/2", repository.one), "refs/heads/gone")

    assert states == {"refs/sym/1": "deleted", "refs/sym/2": "moved", "refs/heads/gone": "gone"}
    assert set(repository.refs()) == {"refs/heads/main", "refs/sym/2", "refs/broken"}


def test_refs_that_git_refuses_keep_no_other(repository, tmp_path, monkeypatch):
    stuck = [f"refs/b/{number}{'x' * 200}" for number in range(3)]
    repository.packed("refs/a", *stuck, "refs/z")
    said = "fatal: prepare: cannot lock ref '{0}': Unable to create '/srv/{0}.lock': Permission denied"
    refuse_refs(tmp_path / "bin", monkeypatch, "refs/b/", said)

    outcomes = repository.delete("refs/a", *stuck, "refs/z")

    assert outcomes.pop(RefToDelete("refs/a")) == outcomes.pop(RefToDelete("refs/z")) == REF_DELETED
    assert {outcome.state for outcome in outcomes.values()} == {"locked"}
    reason = outcomes[RefToDelete(stuck[0])].reason
    assert reason.startswith("Unable to create")
    assert reason.endswith("Permission denied")
    assert len(reason) == 200


def test_a_name_under_which_any_number_of_refs_lie_costs_no_memory_for_them(repository):
    repository.packed(*(f"refs/many/{number:05}" for number in range(30_000)))
    tracemalloc.start()

    states = repository.states("refs/many")

    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Git lists 1.7 MB.
    assert (states, most < 1_500_000) == ({"refs/many": "gone"}, True)


def test_the_default_branch_is_protected_though_it_does_not_exist(repository):
    repository.git("symbolic-ref", "HEAD", "refs/heads/unborn")

    outcomes = repository.delete("refs/heads/unborn", "refs/heads/main")

    assert outcomes == {RefToDelete("refs/heads/unborn"): DEFAULT_BRANCH, RefToDelete("refs/heads/main"): REF_DELETED}


def test_nothing_that_is_set_for_other_gits_counts(repository, tmp_path, monkeypatch):
    other = BareRepository(put_root(tmp_path / "other"))
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


@whole_only
def test_a_complaint_that_names_no_ref_is_tracked_down(repository, monkeypatch, tmp_path):
    names = [f"refs/{number:03}" for number in range(200)]
    repository.packed(*names)
    refuse_refs(tmp_path / "bin", monkeypatch, "refs/123", "fatal: \033[31mmysterious")

    outcomes = repository.delete(*names)

    assert outcomes.pop(RefToDelete("refs/123")) == RefOutcome("locked", r"\x1b[31mmysterious")
    assert set(outcomes.values()) == {REF_DELETED}
    assert set(repository.refs()) == {"refs/heads/main", "refs/123"}


def test_whatever_is_among_them_the_others_go_in_one_transaction(repository, tmp_path, monkeypatch):
    repository.packed("refs/mr/1/head", "refs/mr/2/head", "refs/mr/3/head")
    repository.loose("refs/bad/moved", value=repository.two)
    repository.loose("refs/bad/locked", "refs/bad/locked.lock", "refs/bad/file", "refs/bad/folder/x")
    repository.loose("refs/bad/broken", value="")
    repository.loose("refs/bad/dangling", value="ref: refs/heads/nowhere")
    states = {
        RefToDelete("refs/mr/1/head"): "deleted",
        RefToDelete("refs/mr/3/head", repository.one): "deleted",
        RefToDelete("refs/bad/moved", repository.one): "moved",
        RefToDelete("refs/bad/locked"): "locked",
        RefToDelete("refs/bad/broken"): "locked",
        RefToDelete("refs/bad/file/x"): "gone",
        RefToDelete("refs/bad/folder"): "gone",
        RefToDelete("refs/bad/gone", repository.one): "gone",
        RefToDelete("refs/bad/dangling"): "deleted",
    }
    counting = f'case "$*" in *update-ref*) echo x >> {tmp_path}/calls;; esac'
    replace_git(tmp_path / "bin", monkeypatch, f'{counting}\nexec $GIT "$@"')

    outcomes = repository.delete(*states)

    assert {row: outcome.state for row, outcome in outcomes.items()} == states
    # The first is refused because of the locked ref, and has written nothing.
    assert (tmp_path / "calls").read_text() == "x\nx\n"
    assert set(repository.refs()) == {
        *("refs/heads/main", "refs/mr/2/head", "refs/bad/moved", "refs/bad/locked", "refs/bad/locked.lock"),
        *("refs/bad/file", "refs/bad/folder/x", "refs/bad/broken"),
    }


# Before a ref goes it is said what it was: that, and nothing else, is what git deletes


class Told:
    """What was said before each transaction; *then* is done when it has been."""

    def __init__(self, then=lambda _: None):
        self.each = []
        self._then = then

    def __call__(self, going):
        self.each.append({row.ref: was for row, was in going.items()})
        self._then(going)


@pytest.mark.parametrize("target", ["refs/target", "refs/nowhere"])
def test_of_a_symbolic_ref_it_is_told_where_it_led(repository, target):
    repository.loose("refs/target")
    repository.loose("refs/sym", value=f"ref: {target}")
    told = Told()

    assert repository.states("refs/sym", announce=told) == {"refs/sym": "deleted"}
    assert told.each == [{"refs/sym": f"ref: {target}"}]


def test_nothing_is_told_of_what_is_gone_or_may_not_go(repository):
    repository.loose("refs/moved", value=repository.two)
    told = Told()

    repository.delete("refs/gone", RefToDelete("refs/moved", repository.one), "refs/heads/main", "HEAD", announce=told)

    assert told.each == []


def test_whoever_cannot_be_told_keeps_all_refs(repository):
    repository.loose("refs/a")

    def away(_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        repository.delete("refs/a", announce=away)
    assert ("refs/a" in repository.refs(), repository.locks()) == (True, [])


def test_git_locks_the_refs_while_they_are_announced_and_deletes_none_before(repository):
    repository.packed("refs/a")

    def wait_for_locks(_):
        assert wait_until((repository.path / "packed-refs.lock").exists, ALWAYS_IN_TIME)
        assert "refs/a" in repository.refs()

    assert repository.states("refs/a", announce=wait_for_locks) == {"refs/a": "deleted"}


def test_a_ref_is_deleted_at_the_announced_value_or_stays_and_keeps_no_other(repository, tmp_path, monkeypatch):
    repository.loose("refs/a", "refs/b", "refs/c", "refs/d")
    push = f"for ref in b c; do echo {repository.two} > {repository.path}/refs/$ref; done"
    replace_git(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {push};; esac; exec $GIT "$@"')
    told = Told()
    expecting = RefToDelete("refs/c", repository.one)

    outcomes = repository.delete("refs/a", "refs/b", expecting, "refs/d", announce=told)

    assert [outcomes.get(RefToDelete(f"refs/{letter}")) for letter in "abd"] == [REF_DELETED, REF_CHANGED, REF_DELETED]
    assert (outcomes[expecting], len(told.each)) == (REF_MOVED, 1)
    assert repository.refs().keys() == {"refs/heads/main", "refs/b", "refs/c"}


@pytest.mark.parametrize("target", ["refs/target", "refs/nowhere"])
def test_a_symbolic_ref_that_leads_elsewhere_since_it_was_announced_stays(repository, target):
    repository.loose("refs/target", "refs/other", "refs/a")
    repository.loose("refs/sym", value=f"ref: {target}")

    def point_elsewhere(_):
        repository.loose("refs/sym", value="ref: refs/other")

    outcomes = repository.delete("refs/a", "refs/sym", announce=point_elsewhere)

    assert outcomes == {RefToDelete("refs/a"): REF_DELETED, RefToDelete("refs/sym"): REF_CHANGED}
    assert repository.refs()["refs/sym"] == "ref: refs/other"


def test_a_branch_that_became_the_default_branch_since_it_was_announced_stays(repository):
    repository.loose("refs/heads/a", "refs/heads/b")

    outcomes = repository.delete(
        "refs/heads/a", "refs/heads/b", announce=lambda _: repository.loose("HEAD", value="ref: refs/heads/b")
    )

    assert outcomes == {RefToDelete("refs/heads/a"): REF_DELETED, RefToDelete("refs/heads/b"): REF_CHANGED}
    assert "refs/heads/b" in repository.refs()


def test_what_is_found_lost_while_git_holds_the_locks_stays_and_keeps_no_other(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    locks = []

    def find_lost():
        locks.append({path.name for path in repository.locks()})
        return [RefToDelete("refs/b")]

    outcomes = repository.delete("refs/a", "refs/b", "refs/c", find_lost=find_lost)

    assert outcomes == {
        RefToDelete("refs/a"): REF_DELETED,
        RefToDelete("refs/b"): ROW_CLOSED,
        RefToDelete("refs/c"): REF_DELETED,
    }
    assert {"a.lock", "b.lock", "c.lock"} <= locks[0]
    assert (set(repository.refs()), repository.locks()) == ({"refs/heads/main", "refs/b"}, [])


def test_if_the_question_what_is_lost_raises_git_deletes_nothing_and_leaves_no_lock(repository):
    repository.loose("refs/a")

    def fail():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        repository.delete("refs/a", find_lost=fail)
    assert ("refs/a" in repository.refs(), repository.locks()) == (True, [])


def test_each_hop_to_the_default_branch_is_protected(repository):
    hops = ["refs/heads/a", "refs/heads/b", "refs/heads/c"]
    repository.loose(hops[2])
    for name, target in zip(["HEAD", *hops], hops, strict=False):
        repository.loose(name, value=f"ref: {target}")

    assert repository.delete(*hops) == dict.fromkeys(map(RefToDelete, hops), DEFAULT_BRANCH)
    assert repository.refs().keys() == {"refs/heads/main", *hops}


DAMAGES = {
    "line ends": lambda header, *lines: [line.replace(b"\n", b"\r\n") for line in (header, *lines)],
    "order": lambda header, *lines: [header, *reversed(lines)],
}


@pytest.mark.parametrize("at_once", [1, 200])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_ref_that_a_damaged_packed_refs_hides_from_git_is_not_gone(repository, damage, at_once, monkeypatch):
    monkeypatch.setattr(git_repository, "MAX_NAMES_PER_LISTING", at_once)
    names = [f"refs/a/{number}" for number in range(9)]
    repository.packed(*names)
    file = repository.path / "packed-refs"
    file.write_bytes(b"".join(damage(*file.read_bytes().splitlines(keepends=True))))

    states = repository.states(*names, "refs/gone")

    assert states.pop("refs/gone") == "gone"
    assert "locked" in states.values()
    assert "gone" not in states.values()


# Our rules for names of refs are git's, and git sees no other name

LETTERS = st.one_of(
    st.sampled_from(list("ab.@{/-~^:?*[\\ \x7f\x1f\n")),
    st.sampled_from([".lock", "..", "@{", "//", "/.", "ü", "refs"]),
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
)


def git_takes(name):
    command = ["git", "check-ref-format", name]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


@settings(max_examples=examples(700))
@given(st.lists(LETTERS, max_size=12).map(lambda parts: "refs/" + "".join(parts)))
@example("refs/x\n")
@example("refs/x.lock/y")
@example("refs/../HEAD")
def test_git_takes_exactly_the_names_that_we_do(name):
    assert (git_repository.why_ref_refused(name) is None) == git_takes(name)


def test_a_name_may_be_as_long_as_the_column_and_no_longer():
    assert git_repository.why_ref_refused("refs/".ljust(1_024, "ü")) is None
    assert git_repository.why_ref_refused("refs/".ljust(1_025, "ü")) == "too_long"


OUTSIDE = ["", "HEAD", "FETCH_HEAD", "main", "refs", "Refs/x", "/refs/x", " refs/x", "\ud800"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_git_sees_no_name_outside_refs(name):
    assert git_repository.why_ref_refused(name) == "not_under_refs"


@pytest.mark.parametrize("name", ["refs/heads/x\0refs/heads/main", "refs/heads/\udcff"])
def test_git_sees_no_name_that_is_no_text_for_it(repository, name):
    assert repository.delete(name) == {RefToDelete(name): RefOutcome("rejected", "invalid_name")}
    assert repository.refs() == {"refs/heads/main": repository.one}
