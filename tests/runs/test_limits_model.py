"""Every history of the protocol of limits, and of protocols that are wrong in one line: these are found out."""

import pytest

from tests.harness.limits_model import NOTHING, Child, Protocol, search
from tests.harness.thorough import WHOLE


class GivesBackWhatItDoesNotKnow(Protocol):
    """What an attempt has not counted is given back as unused: so it was."""

    def lost(self, done, number, child):
        for name, then in super().lost(done, number, child):
            yield name, then.add(child.cell, reserved=-min(child.held, then.reserved[child.cell]))


class GivesBackWhatIsRefused(Protocol):
    """What cannot be settled counts as not gone."""

    def refused(self, state, number, child):
        for name, then in super().refused(state, number, child):
            yield name, then.add(child.cell, reserved=-child.held)


class SettlesAgain(Protocol):
    """A child that hears no answer settles once more."""

    def lost(self, done, number, child):
        for name, then in super().lost(done, number, child):
            yield name, then.add(child.cell, reserved=-child.held)


class ReservesLater(Protocol):
    """What is reserved is committed with what goes: a kill undoes it, but not what went outside."""

    def steps(self, state):
        for name, then in super().steps(state):
            if name == "killed" and then.lost != state.lost:
                (cell,) = (number for number, one in enumerate(then.lost) if one != state.lost[number])
                yield name, then.add(cell, reserved=state.lost[cell] - then.lost[cell])
            else:
                yield name, then


class LooksWithoutTheLock(Protocol):
    """What is free is looked at in one transaction, and reserved in another."""

    def reserving(self, state, number, child):
        if child.seen:
            yield from self.granted(state, number, child.seen)
        elif self.free(state):
            yield "looks", state.having(number, Child(seen=self.free(state)))


class SettlesToday(Protocol):
    """A chunk is settled to the day on which it goes, not to that of its reservation."""

    def row(self, state, _child):
        return state.cell


class ForgetsWhatIsReserved(Protocol):
    """Only what went is used."""

    def free(self, state):
        return super().free(state._replace(reserved=NOTHING))


class KeepsTheRest(Protocol):
    """What did not go of a chunk is not given back."""

    def settled(self, state, child, count, _part):
        return state.add(child.cell, records=count, reserved=-count)


def test_no_history_deletes_more_than_a_limit_and_none_is_stuck():
    moments, wrong = search(Protocol(faults=2 if WHOLE else 1))

    assert wrong is None
    assert moments > 50_000


@pytest.mark.parametrize(
    "spoiled",
    [
        GivesBackWhatItDoesNotKnow,
        GivesBackWhatIsRefused,
        SettlesAgain,
        ReservesLater,
        LooksWithoutTheLock,
        SettlesToday,
        ForgetsWhatIsReserved,
    ],
)
def test_a_protocol_that_is_wrong_in_one_line_deletes_more_than_a_limit(spoiled):
    protocol = spoiled(faults=1)
    protocol.accounts = False

    _moments, wrong = search(protocol)

    assert wrong is not None
    assert wrong[-1].startswith("more than the limit of a ")


def test_a_protocol_that_gives_nothing_back_is_found_out():
    _moments, wrong = search(KeepsTheRest(faults=0))

    assert wrong is not None
    assert wrong[-1] == "more is used up than the dead held"
