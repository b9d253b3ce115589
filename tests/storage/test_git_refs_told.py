"""Before a ref goes it is said what it was: that, and nothing else, is what git deletes."""

import pytest

from forgekeeper.storage.git_refs import CHANGES, Doomed


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

    assert repository.states("refs/sym", before=told) == {"refs/sym": "deleted"}
    assert told.each == [{"refs/sym": f"ref: {target}"}]


def test_nothing_is_told_of_what_is_gone_or_may_not_go(repository):
    repository.loose("refs/moved", value=repository.two)
    told = Told()

    repository.delete("refs/gone", Doomed("refs/moved", repository.one), "refs/heads/main", "HEAD", before=told)

    assert told.each == []


def test_whoever_cannot_be_told_keeps_all_refs(repository):
    repository.loose("refs/a")

    def away(_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        repository.delete("refs/a", before=away)
    assert "refs/a" in repository.refs()


def test_a_ref_that_moves_all_the_time_stays_and_keeps_no_other(repository):
    repository.loose("refs/a", "refs/b", "refs/c")
    values = (repository.two, repository.one)
    told = Told(lambda _: repository.loose("refs/b", value=values[len(told.each) % 2 == 0]))

    states = repository.states("refs/a", "refs/b", "refs/c", before=told)

    assert states == {"refs/a": "deleted", "refs/b": "locked", "refs/c": "deleted"}
    assert len(told.each) == CHANGES
    assert set(repository.refs()) == {"refs/heads/main", "refs/b"}
