"""Before a ref goes it is said what it was: that, and nothing else, is what git deletes."""

import pytest

from forgekeeper.storage.git_refs import CHANGES, DELETED, MOVED, Doomed
from tests.harness.git_samples import Bare, put_root, stand_in

ELSEWHERE = "1" * 40


@pytest.fixture
def repository(tmp_path):
    return Bare(put_root(tmp_path / "repositories"))


class Told:
    """What was said before each transaction; *then* is done when it has been."""

    def __init__(self, then=lambda _: None):
        self.each = []
        self._then = then

    def __call__(self, going):
        self.each.append({row.ref: was for row, was in going.items()})
        self._then(going)

    @property
    def last(self):
        """The last that was said of each ref."""
        return {ref: was for going in self.each for ref, was in going.items()}


def test_what_stands_to_go_is_told_with_what_it_was(repository):
    repository.packed("refs/packed")
    repository.loose("refs/loose", value=repository.two)
    repository.loose("refs/no/object", value=ELSEWHERE)
    told = Told()

    repository.delete("refs/packed", "refs/loose", "refs/no/object", before=told)

    assert told.each == [{"refs/loose": repository.two, "refs/no/object": ELSEWHERE, "refs/packed": repository.one}]


@pytest.mark.parametrize("target", ["refs/target", "refs/nowhere"])
def test_of_a_symbolic_ref_it_is_told_where_it_led(repository, target):
    repository.loose("refs/target")
    repository.loose("refs/sym", value=f"ref: {target}")
    told = Told()

    assert repository.states("refs/sym", before=told) == {"refs/sym": "deleted"}
    assert told.each == [{"refs/sym": f"ref: {target}"}]


def test_it_is_told_while_everything_is_still_there(repository):
    repository.loose("refs/a", "refs/b")
    seen = []

    repository.delete("refs/a", "refs/b", before=lambda _: seen.append(set(repository.refs())))

    assert seen == [{"refs/heads/main", "refs/a", "refs/b"}]


def test_nothing_is_told_of_what_is_gone_or_may_not_go(repository):
    repository.loose("refs/moved", value=repository.two)
    told = Told()

    repository.delete("refs/gone", Doomed("refs/moved", repository.one), "refs/heads/main", "HEAD", before=told)

    assert told.each == []


def test_of_rows_with_the_same_ref_those_are_told_that_agree(repository):
    repository.loose("refs/a")
    rows = [Doomed("refs/a"), Doomed("refs/a", repository.one), Doomed("refs/a", repository.two)]
    told = []

    repository.delete(*rows, before=told.append)

    assert told == [dict.fromkeys(rows[:2], repository.one)]


def test_whoever_cannot_be_told_keeps_all_refs(repository):
    repository.loose("refs/a")

    def away(_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        repository.delete("refs/a", before=away)
    assert "refs/a" in repository.refs()


def test_a_ref_pushed_to_after_it_was_told_goes_as_what_it_is_then(repository):
    repository.loose("refs/a", "refs/b")
    told = Told(lambda _: repository.loose("refs/b", value=repository.two))

    outcomes = repository.delete("refs/a", "refs/b", before=told)

    assert outcomes == {Doomed("refs/a"): DELETED, Doomed("refs/b"): DELETED}
    assert told.each == [{"refs/a": repository.one, "refs/b": repository.one}, {"refs/b": repository.two}]
    assert set(repository.refs()) == {"refs/heads/main"}


def test_of_rows_with_the_same_ref_a_push_keeps_the_one_that_expects_what_it_was(repository):
    repository.loose("refs/a")
    rows = [Doomed("refs/a", repository.one), Doomed("refs/a")]

    outcomes = repository.delete(*rows, before=Told(lambda _: repository.loose("refs/a", value=repository.two)))

    assert outcomes == {rows[0]: MOVED, rows[1]: DELETED}


def test_a_ref_that_moves_all_the_time_stays_and_keeps_no_other(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    values = (repository.two, repository.one)
    told = Told(lambda _: repository.loose("refs/b", value=values[len(told.each) % 2 == 0]))

    states = repository.states("refs/a", "refs/b", "refs/c", before=told)

    assert states == {"refs/a": "deleted", "refs/b": "locked", "refs/c": "deleted"}
    assert len(told.each) == CHANGES
    assert set(repository.refs()) == {"refs/heads/main", "refs/b"}


def test_after_a_refusal_nothing_is_told_twice(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    told = Told(lambda _: (repository.path / "refs/b.lock").touch())

    states = repository.states("refs/a", "refs/b", "refs/c", before=told)

    assert states == {"refs/a": "deleted", "refs/b": "locked", "refs/c": "deleted"}
    assert len(told.each) == 1


def test_with_nobody_to_tell_a_push_changes_nothing(repository, tmp_path, monkeypatch):
    repository.loose("refs/a")
    push = f"echo {repository.two} > {repository.path}/refs/a"
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {push};; esac; exec $GIT "$@"')

    assert repository.states("refs/a") == {"refs/a": "deleted"}
