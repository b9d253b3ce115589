"""What becomes of a project's size if GitLab's artifacts and sizes are in two databases, in every order of events.

Nothing of this is built (docs/adr/0047-sizes-in-another-database.md): the model is the proof that came first.  Deletions
of artifacts and the changes of sizes that they cause are committed in the database `ci`; carriers take these changes to
the database `main`, and may die between any two commits.  All reachable states are searched.
"""

from collections import deque
from dataclasses import dataclass, replace

ARTIFACTS = frozenset({0, 1})
CARRIERS = (0, 1)
IDLE = ("idle",)


@dataclass(frozen=True)
class World:
    """Both databases, and what each carrier knows; every artifact has the size 1.

    *changes* has an artifact and the number of the transfer that carries its size, None before there is one.  *applied*
    is the number of the last transfer in `main`.  *counted* has the artifacts that a recount of GitLab's has counted so
    far, None if there is no recount; its row is removed in the end, as GitLab does it.
    """

    artifacts: frozenset = ARTIFACTS
    changes: frozenset = frozenset()
    size: int = len(ARTIFACTS)
    applied: int = 0
    counted: frozenset | None = None
    recounts: int = 0
    carriers: tuple = (IDLE, IDLE)

    def with_carrier(self, carrier, does, **changes):
        carriers = tuple(does if number == carrier else one for number, one in enumerate(self.carriers))
        return replace(self, carriers=carriers, **changes)

    @property
    def is_settled(self):
        return not self.changes and self.counted is None and self.carriers == (IDLE, IDLE)


def delete(world):
    """Delete an artifact unless `main` shows a recount."""
    if world.counted is None:
        for artifact in world.artifacts:
            changes = world.changes | {(artifact, None)}
            yield replace(world, artifacts=world.artifacts - {artifact}, changes=changes)


def number_transfers(world, *, within_lock=True):
    """Carry changes by transfers whose numbers `main` has in their order."""
    for carrier in CARRIERS:
        does, *known = world.carriers[carrier]
        numbers = {number for _artifact, number in world.changes} - {None}
        if does == "idle" and world.changes:
            # The number of the next transfer is read under the lock of `ci` that is held until it is written there.
            yield world.with_carrier(carrier, ("numbered" if within_lock else "read", world.applied + 1))
        elif does == "read":
            yield world.with_carrier(carrier, ("numbered", *known))
        if does == "numbered":
            (number,) = known
            if within_lock:
                number = world.applied + 1
            marked = world.changes if numbers else frozenset((one, number) for one, _number in world.changes)
            open_one = min({number for _artifact, number in marked} - {None}, default=None)
            does = IDLE if open_one is None else ("apply", open_one, sum(1 for _one, of in marked if of == open_one))
            yield world.with_carrier(carrier, does, changes=marked)
        elif does == "apply" and world.counted is None:
            number, total = known
            news = {"applied": number, "size": world.size - total} if world.applied == number - 1 else {}
            yield world.with_carrier(carrier, ("clear", number), **news)
        elif does == "clear":
            left = frozenset(change for change in world.changes if change[1] != known[0])
            yield world.with_carrier(carrier, IDLE, changes=left)


def number_outside_the_lock(world):
    """Read the number of the next transfer before the lock is held: a carrier may fall behind."""
    yield from number_transfers(world, within_lock=False)


def die(world):
    """Let a carrier die between two commits."""
    for carrier in CARRIERS:
        if world.carriers[carrier] != IDLE:
            yield world.with_carrier(carrier, IDLE)


def recount(world):
    """Let GitLab count the artifacts of the project anew, once: reset, count each, and remove the recount's row."""
    if world.counted is None and not world.recounts:
        yield replace(world, size=0, counted=frozenset(), recounts=1)
    elif world.counted is not None:
        if left := world.artifacts - world.counted:
            yield replace(world, counted=world.counted | {min(left)}, size=world.size + 1)
        else:
            yield replace(world, counted=None)


def find_wrong_history(*events):
    """Return the shortest history that ends settled with a wrong size, as worlds; None if there is none."""
    before, waiting = {World(): None}, deque([World()])
    while waiting:
        world = waiting.popleft()
        if world.is_settled and world.size != len(world.artifacts):
            history = [world]
            while (world := before[world]) is not None:
                history.append(world)
            return history[::-1]
        for event in events:
            for after in event(world):
                if after not in before:
                    before[after] = world
                    waiting.append(after)
    return None


def test_sizes_are_carried_exactly_once_however_carriers_meet_and_die():
    assert find_wrong_history(delete, number_transfers, die) is None


def test_the_search_finds_what_goes_wrong_if_a_number_is_read_before_the_lock_is_held():
    assert find_wrong_history(delete, number_outside_the_lock, die) is not None


def test_a_recount_between_a_deletion_and_its_size_subtracts_the_size_twice():
    history = find_wrong_history(delete, number_transfers, recount)

    deleted, *_, settled = (world for world in history if len(world.artifacts) < len(ARTIFACTS))
    assert (deleted.recounts, settled.recounts) == (0, 1)
    assert settled.size < len(settled.artifacts)
