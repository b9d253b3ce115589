"""The protocol of limits as a state machine, and a search through all its histories: `RunGuard` without a database.

Two children reserve, delete and settle, a step at a time.  Between any two steps a child may be killed, a reply may be
lost, a settlement may fail, a day or a run may end, a backup may be made and restored.  Totals are the state of the
database.  *gone* counts the real deletions, by the run and day of their reservation.
"""

from collections.abc import Iterator
from typing import NamedTuple

RUNS = DAYS = 2
CELLS = RUNS * DAYS
Cells = tuple[int, ...]
NO_CELLS: Cells = (0,) * CELLS
Steps = Iterator[tuple[str, "State"]]


class Child(NamedTuple):
    """The knowledge of an attempt: the rest of its reservation, and its run and day.

    *out* counts records that were deleted outside the database and are not settled yet.  *seen* is the rest of the
    limits as a child has read it that looks and reserves in two steps.
    """

    held: int = 0
    cell: int = 0
    out: int = 0
    seen: int = 0


IDLE = Child()


class Backup(NamedTuple):
    """The state of the database, and of the world that it describes."""

    records: Cells
    reserved: Cells
    gone: Cells
    lost: Cells


class State(NamedTuple):
    """A moment.  *lost* is the reserved rest of dead children; *crowded* says that a reservation left others too little."""

    records: Cells = NO_CELLS
    reserved: Cells = NO_CELLS
    gone: Cells = NO_CELLS
    lost: Cells = NO_CELLS
    children: tuple[Child, ...] = (IDLE, IDLE)
    run: int = 0
    day: int = 0
    faults: int = 0
    backup: Backup | None = None
    restores: int = 0
    crowded: bool = False

    @property
    def cell(self) -> int:
        """The row of totals of a reservation that is made now."""
        return self.run * DAYS + self.day

    def sum_of_run(self, cells: Cells, run: int) -> int:
        """Add up the cells of a run."""
        return sum(cells[run * DAYS : (run + 1) * DAYS])

    def sum_of_day(self, cells: Cells, day: int) -> int:
        """Add up the cells of a day."""
        return sum(cells[day::DAYS])

    def read_usage(self) -> tuple[int, int]:
        """Return the used part of the limits of the present run and day."""
        both = self.records, self.reserved
        return sum(self.sum_of_run(one, self.run) for one in both), sum(self.sum_of_day(one, self.day) for one in both)

    def add(self, cell: int, records: int = 0, reserved: int = 0) -> "State":
        """Add to a row of totals."""
        return self._replace(records=_plus(self.records, cell, records), reserved=_plus(self.reserved, cell, reserved))

    def delete(self, cell: int, count: int) -> "State":
        """Count real deletions."""
        return self._replace(gone=_plus(self.gone, cell, count))

    def replace_child(self, number: int, child: Child) -> "State":
        """Replace a child; the order of the children makes no difference."""
        return self._replace(children=tuple(sorted((child, *self.children[:number], *self.children[number + 1 :]))))

    def end_child(self, number: int, child: Child) -> "State":
        """Let a child die that settles nothing; another attempt begins in its place."""
        lost = _plus(self.lost, child.cell, child.held)
        return self.replace_child(number, IDLE)._replace(lost=lost, faults=self.faults + 1)


def _plus(cells: Cells, cell: int, by: int) -> Cells:
    return tuple(value + by if number == cell else value for number, value in enumerate(cells))


class Protocol:
    """The protocol, with limits of a run and of a day, at most *faults* faults and *backups* backups.

    A child reserves up to *chunk* records, or up to *chunks* times as many if that is at most a *share* of the rest.
    It deletes rows chunk by chunk: each statement settles its own rows.  With *accounts* each moment has to explain the
    used part of the limits; without it only deletions are compared with the limits.
    """

    run, day, chunk, chunks, share = 3, 4, 1, 2, 1.5
    accounts = True

    def __init__(self, faults: int, *, backups: int = 0) -> None:
        self.faults, self.backups = faults, backups

    def find_steps(self, state: State) -> Steps:
        """Yield the possible next steps and their results."""
        for number, child in enumerate(state.children):
            yield from self.find_child_steps(state, number, child)
            if child != IDLE and state.faults < self.faults:
                yield "killed", state.end_child(number, child)
        if state.day + 1 < DAYS:
            yield "midnight", state._replace(day=state.day + 1)
        if state.run + 1 < RUNS:
            yield "another run", state._replace(run=state.run + 1)
        if state.backup is None and self.backups:
            # A child that holds a reservation now does not exist after the restoration.
            yield "backup", state._replace(backup=Backup(state.records, state.reserved, state.gone, state.reserved))
        elif state.backup is not None and state.restores == 0:
            yield "restored", state._replace(**state.backup._asdict(), children=(IDLE, IDLE), restores=1)

    def find_child_steps(self, state: State, number: int, child: Child) -> Steps:
        """Yield the next steps of a child."""
        if child.out:
            yield from self.settle_outside(state, number, child)
        elif child.held:
            yield from self.delete_rows(state, number, child)
            yield from self.delete_outside(state, number, child)
            yield "gives back", self.give_back(state, child).replace_child(number, IDLE)
        else:
            yield from self.reserve(state, number, child)

    def count_free(self, state: State) -> int:
        """Return the rest of the limits."""
        used_by_run, used_by_day = state.read_usage()
        return max(0, min(self.run - used_by_run, self.day - used_by_day))

    def find_cell(self, _state: State, child: Child) -> int:
        """Return the row of totals to which a child settles: the row of its reservation."""
        return child.cell

    def reserve(self, state: State, number: int, _child: Child) -> Steps:
        """Reserve in one transaction, under the lock of the batch."""
        yield from self.grant(state, number, self.count_free(state))

    def grant(self, state: State, number: int, free: int) -> Steps:
        """Yield the reservations that the rest *free* of the limits allows."""
        for wanted in range(1, max(min(self.chunk, free), self.find_most_ahead(free)) + 1):
            child = Child(wanted, state.cell)
            # Nobody else gets a chunk of a rest that was enough for several.
            crowds = wanted > self.chunk and self.count_free(state) - wanted < self.chunk
            reserved = state.add(state.cell, reserved=wanted).replace_child(number, child)._replace(crowded=crowds)
            yield "reserves", reserved
            yield from self.lose_reply(reserved, reserved.children.index(child), child)

    def find_most_ahead(self, free: int) -> int:
        """Return the largest reservation for several chunks."""
        return min(self.chunk * self.chunks, int(free / self.share))

    def delete_rows(self, state: State, number: int, child: Child) -> Steps:
        """Delete a chunk and settle its rows in one statement; the child keeps the rest of its reservation."""
        for count in range(min(self.chunk, child.held) + 1):
            done = self.settle_rows(state.delete(child.cell, count), child, count)
            left = child._replace(held=child.held - count) if count < child.held else IDLE
            yield "rows go", done.replace_child(number, left)
            yield from self.lose_reply(done, number, left if left.held else child._replace(held=0))

    def settle_rows(self, state: State, child: Child, count: int) -> State:
        """Count rows, and take them from the reservation."""
        return state.add(self.find_cell(state, child), records=count, reserved=-count)

    def give_back(self, state: State, child: Child) -> State:
        """Give back the rest of a reservation."""
        return state.add(self.find_cell(state, child), reserved=-child.held)

    def delete_outside(self, state: State, number: int, child: Child) -> Steps:
        """Delete objects or refs of one chunk, which is reserved alone."""
        for count in range(1, child.held + 1) if child.held <= self.chunk else ():
            yield "goes outside", state.delete(child.cell, count).replace_child(number, child._replace(out=count))

    def settle_outside(self, state: State, number: int, child: Child) -> Steps:
        """Settle deletions outside the database; if that fails, the reservation stays used."""
        done = state.add(self.find_cell(state, child), records=child.out, reserved=-child.held)
        yield "settles", done.replace_child(number, IDLE)
        yield from self.lose_reply(done, number, child)
        if state.faults < self.faults:
            yield from self.refuse_settlement(state, number, child)

    def refuse_settlement(self, state: State, number: int, child: Child) -> Steps:
        """Let PostgreSQL refuse the settlement: the attempt ends."""
        yield "a settlement is refused", state.end_child(number, child)

    def lose_reply(self, done: State, number: int, child: Child) -> Steps:
        """Lose the reply to the transaction that led to *done*: the attempt ends, and settles nothing more."""
        if done.faults < self.faults:
            yield "a reply is lost", done.end_child(number, child)

    def find_violation(self, state: State) -> str | None:
        """Return the sentence that describes a broken promise of this moment."""
        for run in range(RUNS):
            if state.sum_of_run(state.gone, run) > self.run:
                return "more than the limit of a run"
        for day in range(DAYS):
            if state.sum_of_day(state.gone, day) > self.day:
                return "more than the limit of a day"
        return self.find_unexplained(state) if self.accounts else None

    def find_unexplained(self, state: State) -> str | None:
        """Return the sentence that describes used limits without a reason."""
        for cell in range(CELLS):
            live = sum(child.held - child.out for child in state.children if child.cell == cell)
            unknown = state.records[cell] + state.reserved[cell] - state.gone[cell] - live
            if unknown > state.lost[cell]:
                return "more is used up than the dead held"
            if unknown < 0:
                return "more went than is used up"
        if state.restores == 0 and sum(state.lost) > state.faults * self.chunk * self.chunks:
            return "a dead child held more than several chunks"
        return "a child has reserved so much that others find nothing" if state.crowded else None


def search_histories(protocol: Protocol) -> tuple[int, list[str] | None]:
    """Visit each moment of each history; return their number, and the shortest history that breaks a promise."""
    first = State()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    level = [first]
    while level:
        following = []
        for state in level:
            for name, then in protocol.find_steps(state):
                if then not in came_from:
                    came_from[then] = state, name
                    if violation := protocol.find_violation(then):
                        return len(came_from), [*_list_steps(came_from, then), violation]
                    following.append(then)
        level = following
    return len(came_from), None


def _list_steps(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names = []
    while (step := came_from[state]) is not None:
        state, name = step
        names.append(name)
    return names[::-1]
