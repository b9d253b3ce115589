"""All histories of the protocol of limits, and of protocols that are wrong in one line: the search finds each error."""

import pytest

from tests.harness.limits_model import IDLE, NO_CELLS, Child, Protocol, search_histories
from tests.harness.thorough import RUNS_WHOLE_SUITE


class GivesBackUnknownDeletions(Protocol):
    """An attempt without an answer gives its reservation back."""

    def lose_reply(self, done, number, child):
        for name, then in super().lose_reply(done, number, child):
            yield name, then.add(child.cell, reserved=-min(child.held, then.reserved[child.cell]))


class GivesBackRefusedSettlements(Protocol):
    """Deletions outside that cannot be settled count as not made."""

    def refuse_settlement(self, state, number, child):
        for name, then in super().refuse_settlement(state, number, child):
            yield name, then.add(child.cell, reserved=-child.held)


class SettlesAgain(Protocol):
    """An attempt without an answer settles once more."""

    def lose_reply(self, done, number, child):
        for name, then in super().lose_reply(done, number, child):
            yield name, then.add(child.cell, reserved=-max(child.held, 1))


class ContinuesWithoutAnAnswer(Protocol):
    """An attempt that hears no answer to a chunk continues with the reservation that it had before the chunk."""

    def delete_rows(self, state, number, child):
        for name, then in super().delete_rows(state, number, child):
            lost = name == "a reply is lost"
            yield name, state_with(then, child) if lost else then


def state_with(state, child):
    """Return the state with the child in place of the attempt that ended without an answer."""
    number = state.children.index(IDLE)
    return state.replace_child(number, child)._replace(lost=NO_CELLS)


class ReservesInTheDeletion(Protocol):
    """A reservation is committed with the deletion: a kill undoes it, but not the deletion outside."""

    def find_steps(self, state):
        for name, then in super().find_steps(state):
            if name == "killed" and then.lost != state.lost:
                (cell,) = (number for number, one in enumerate(then.lost) if one != state.lost[number])
                yield name, then.add(cell, reserved=state.lost[cell] - then.lost[cell])
            else:
                yield name, then


class LooksWithoutTheLock(Protocol):
    """The rest of the limits is read in one transaction, and reserved in another."""

    def reserve(self, state, number, child):
        if child.seen:
            yield from self.grant(state, number, child.seen)
        elif free := self.count_free(state):
            yield "looks", state.replace_child(number, Child(seen=free))


class SettlesToday(Protocol):
    """A chunk is settled to the day of its deletion instead of the day of its reservation."""

    def find_cell(self, state, _child):
        return state.cell


class IgnoresReservations(Protocol):
    """Only deletions count as used."""

    def count_free(self, state):
        return super().count_free(state._replace(reserved=NO_CELLS))


class SettlesAllWithAChunk(Protocol):
    """A chunk settles the whole reservation, and the child continues with the rest of it."""

    def settle_rows(self, state, child, count):
        return state.add(child.cell, records=count, reserved=-child.held)


class GivesBackAndContinues(Protocol):
    """A child gives the rest back after a chunk, and keeps it."""

    def delete_rows(self, state, number, child):
        for name, then in super().delete_rows(state, number, child):
            yield name, then
            left = next((one for one in then.children if one.held and one not in state.children), None)
            if left is not None:
                yield "gives the rest back", then.add(left.cell, reserved=-left.held)


class ExtendsWithoutALook(Protocol):
    """A child with a reservation adds a chunk to it without reading the rest of the limits."""

    def find_child_steps(self, state, number, child):
        yield from super().find_child_steps(state, number, child)
        if child.held and not child.out:
            more = child._replace(held=child.held + 1)
            yield "reserves more", state.add(child.cell, reserved=1).replace_child(number, more)


class KeepsTheRest(Protocol):
    """The records of a reservation that were not deleted are not given back."""

    def give_back(self, state, _child):
        return state


class ReservesAllThatIsLeft(Protocol):
    """A reservation for several chunks leaves nothing for others."""

    share = 1


class ReservesWithoutABound(Protocol):
    """A reservation grows beyond the number of chunks."""

    run, day = 6, 6

    def find_most_ahead(self, free):
        return int(free / self.share)


@pytest.mark.parametrize(("faults", "backups"), [(1, 1), (2, 0)] if RUNS_WHOLE_SUITE else [(1, 0)])
def test_no_history_deletes_more_than_a_limit_and_only_dead_attempts_keep_reservations(faults, backups):
    moments, violation = search_histories(Protocol(faults, backups=backups))

    assert violation is None
    assert moments > 5_000


@pytest.mark.parametrize(
    "wrong",
    [
        GivesBackUnknownDeletions,
        GivesBackRefusedSettlements,
        SettlesAgain,
        ContinuesWithoutAnAnswer,
        ReservesInTheDeletion,
        LooksWithoutTheLock,
        SettlesToday,
        IgnoresReservations,
        SettlesAllWithAChunk,
        GivesBackAndContinues,
        ExtendsWithoutALook,
    ],
)
def test_a_protocol_that_is_wrong_in_one_line_deletes_more_than_a_limit(wrong):
    protocol = wrong(faults=1)
    protocol.accounts = False

    _moments, violation = search_histories(protocol)

    assert violation is not None
    assert violation[-1].startswith("more than the limit of a ")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (KeepsTheRest, "more is used up than the dead held"),
        (ReservesAllThatIsLeft, "a child has reserved so much that others find nothing"),
        (ReservesWithoutABound, "a dead child held more than several chunks"),
    ],
)
def test_a_protocol_that_wastes_limits_is_found(wrong, sentence):
    _moments, violation = search_histories(wrong(faults=1))

    assert violation is not None
    assert violation[-1] == sentence
