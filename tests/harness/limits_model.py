"""The protocol of limits as a state machine, and every history of it: what `Brakes` is to do, without a database.

Two children reserve, delete and settle, a step at a time.  Between any two steps one may be killed, a reply may be lost,
a settlement may fail, a day or a run may end, a backup may be made and restored.  Totals are what the database says;
*gone* is what really went, by the run and day on which it was allowed.
"""

from collections.abc import Iterator
from typing import NamedTuple

RUNS = DAYS = 2
CELLS = RUNS * DAYS
Cells = tuple[int, ...]
NOTHING: Cells = (0,) * CELLS


class Child(NamedTuple):
    """What an attempt knows: what it holds, of which run and day, and what went outside and is not settled yet.

    *seen* is what one has found to be free that looks and reserves in two steps.
    """

    held: int = 0
    cell: int = 0
    out: int = 0
    seen: int = 0


IDLE = Child()


class Backup(NamedTuple):
    """What the database, and the world as it describes it, was."""

    records: Cells
    reserved: Cells
    gone: Cells
    lost: Cells


class State(NamedTuple):
    """A moment.  *lost* is what those held who died; *faults* and *restores* are how many there were."""

    records: Cells = NOTHING
    reserved: Cells = NOTHING
    gone: Cells = NOTHING
    lost: Cells = NOTHING
    children: tuple[Child, ...] = (IDLE, IDLE)
    run: int = 0
    day: int = 0
    faults: int = 0
    backup: Backup | None = None
    restores: int = 0

    @property
    def cell(self) -> int:
        """Where what is reserved now counts."""
        return self.run * DAYS + self.day

    def of_run(self, cells: Cells, run: int) -> int:
        return sum(cells[run * DAYS : (run + 1) * DAYS])

    def of_day(self, cells: Cells, day: int) -> int:
        return sum(cells[day::DAYS])

    def used(self) -> tuple[int, int]:
        """Return what is used of the limits of the present run and day."""
        both = self.records, self.reserved
        return sum(self.of_run(one, self.run) for one in both), sum(self.of_day(one, self.day) for one in both)

    def add(self, cell: int, records: int = 0, reserved: int = 0) -> "State":
        return self._replace(records=_plus(self.records, cell, records), reserved=_plus(self.reserved, cell, reserved))

    def went(self, cell: int, count: int) -> "State":
        return self._replace(gone=_plus(self.gone, cell, count))

    def having(self, number: int, child: Child) -> "State":
        # Which of the children it is makes no difference.
        return self._replace(children=tuple(sorted((child, *self.children[:number], *self.children[number + 1 :]))))

    def dies(self, number: int, child: Child) -> "State":
        """Let a child end that knows nothing of what it holds; another attempt begins in its place."""
        lost = _plus(self.lost, child.cell, child.held)
        return self.having(number, IDLE)._replace(lost=lost, faults=self.faults + 1)


def _plus(cells: Cells, cell: int, by: int) -> Cells:
    return tuple(value + by if number == cell else value for number, value in enumerate(cells))


class Protocol:
    """The protocol, with limits of a run and of a day, and chunks of so many records at most; so many *faults* happen.

    Where it *accounts*, each moment has to explain what is used; otherwise only that is looked at which went.
    """

    run, day, chunk = 2, 3, 2
    accounts = True

    def __init__(self, faults: int) -> None:
        self.faults = faults

    def free(self, state: State) -> int:
        used_by_run, used_by_day = state.used()
        return max(0, min(self.run - used_by_run, self.day - used_by_day))

    def row(self, _state: State, child: Child) -> int:
        """Return the row to which a chunk is settled: that of its reservation."""
        return child.cell

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Return what may happen next, and what comes of it."""
        for number, child in enumerate(state.children):
            yield from self.of_child(state, number, child)
            if child != IDLE and state.faults < self.faults:
                yield "killed", state.dies(number, child)
        if state.day + 1 < DAYS:
            yield "midnight", state._replace(day=state.day + 1)
        if state.run + 1 < RUNS:
            yield "another run", state._replace(run=state.run + 1)
        if state.backup is None:
            # A child that held something when it was made is not there when it is restored.
            yield "backup", state._replace(backup=Backup(state.records, state.reserved, state.gone, state.reserved))
        elif state.restores == 0:
            was = state.backup
            yield "restored", state._replace(**was._asdict(), children=(IDLE, IDLE), restores=1)

    def of_child(self, state: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        if child.held == 0:
            yield from self.reserving(state, number, child)
        elif child.out == 0:
            yield from self.deleting_rows(state, number, child)
            yield from self.deleting_outside(state, number, child)
            yield "gives back", state.add(child.cell, reserved=-child.held).having(number, IDLE)
        else:
            yield from self.settling(state, number, child)

    def reserving(self, state: State, number: int, _child: Child) -> Iterator[tuple[str, State]]:
        """Reserve in one transaction, under the lock of the batch."""
        yield from self.granted(state, number, self.free(state))

    def granted(self, state: State, number: int, free: int) -> Iterator[tuple[str, State]]:
        for wanted in range(1, min(self.chunk, free) + 1):
            child = Child(wanted, state.cell)
            reserved = state.add(state.cell, reserved=wanted).having(number, child)
            yield "reserves", reserved
            yield from self.lost(reserved, reserved.children.index(child), child)

    def deleting_rows(self, state: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        """Delete rows, and settle them, in one statement; of a part where the whole has raised."""
        for part in range(1, child.held + 1):
            left = child._replace(held=child.held - part) if part < child.held else IDLE
            for count in range(part + 1):
                done = self.settled(state.went(child.cell, count), child, count, part)
                yield "rows go", done.having(number, left)
                yield from self.lost(done, number, child)

    def deleting_outside(self, state: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        for count in range(1, child.held + 1):
            yield "goes outside", state.went(child.cell, count).having(number, child._replace(out=count))

    def settling(self, state: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        """Settle what went outside; where that fails its rows stay, and what was reserved stays used."""
        done = self.settled(state, child, child.out, child.held)
        yield "settles", done.having(number, IDLE)
        yield from self.lost(done, number, child)
        if state.faults < self.faults:
            yield from self.refused(state, number, child)

    def refused(self, state: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        yield "a settlement is refused", state.dies(number, child)

    def settled(self, state: State, child: Child, count: int, part: int) -> State:
        return state.add(self.row(state, child), records=count, reserved=-part)

    def lost(self, done: State, number: int, child: Child) -> Iterator[tuple[str, State]]:
        """Lose the reply to what was *done*: the attempt ends, and touches nothing of it again."""
        if done.faults < self.faults:
            yield "a reply is lost", done.dies(number, child)

    def broken(self, state: State) -> str | None:
        """Say what is wrong with this moment: more went than a limit, or somebody is stuck for ever."""
        for run in range(RUNS):
            if state.of_run(state.gone, run) > self.run:
                return "more than the limit of a run"
        for day in range(DAYS):
            if state.of_day(state.gone, day) > self.day:
                return "more than the limit of a day"
        for cell in range(CELLS) if self.accounts else ():
            live = sum(child.held - child.out for child in state.children if child.cell == cell)
            unknown = state.records[cell] + state.reserved[cell] - state.gone[cell] - live
            if unknown > state.lost[cell]:
                return "more is used up than the dead held"
            if unknown < 0:
                return "more went than is used up"
        return None


def search(protocol: Protocol) -> tuple[int, list[str] | None]:
    """Look at every moment of every history; return how many, and the shortest one that breaks what is promised."""
    first = State()
    came: dict[State, tuple[State, str] | None] = {first: None}
    level = [first]
    while level:
        following = []
        for state in level:
            for name, then in protocol.steps(state):
                if then not in came:
                    came[then] = state, name
                    if wrong := protocol.broken(then):
                        return len(came), [*_way(came, then), wrong]
                    following.append(then)
        level = following
    return len(came), None


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names = []
    while (step := came[state]) is not None:
        state, name = step
        names.append(name)
    return names[::-1]
