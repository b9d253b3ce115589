"""Every state in which a thing may be: what users did to it, and what forgekeeper was then allowed to do.

A server may go back to what it knew at an earlier moment, when its files were copied.  Then whatever rows, or the
register, have said in between is undone, and the states are those of that moment again; what cannot be undone stays:
objects are not there again, and refs.
"""

from __future__ import annotations

from collections import defaultdict

DAY, UPLOAD = 24 * 3600, 3 * 3600
"""After so many seconds an import is stale, and an upload."""
REFUSED = object()
"""In place of a state: the operation would have been answered with no."""


class Model:
    """The states of one kind of thing: what an operation makes of each, and what forgekeeper may make of it."""

    start = None
    server = "postgres"
    """The server that knows its state."""

    def returned(self, kept, _present):
        """Return the states after the server has gone back to one of *kept* from one of *present*."""
        return set(kept)

    def gone(self, state):
        """Say whether there is nothing in that state."""
        return state is None

    def blame(self, states, operation):
        """Say which property is broken when the operation cannot have been answered so in any of the states."""
        came_back = operation.do == "read" and all(map(self.gone, states))
        return "P8" if came_back else "P2"


class Status(Model):
    """A user's status: when it clears itself, or None where there is none."""

    def effect(self, state, operation):
        if operation.do == "set":
            return _number(operation.args["clear"])
        if operation.do == "read":
            return state if state == _number(operation.value) else REFUSED
        if state is None:
            return REFUSED
        return None if operation.do == "clear" else _number(operation.args["clear"])

    def drift(self, state, _since, until):
        if state is not None and state <= until:
            yield None


class Import(Model):
    """An import or an entity: (status, touched), `timeout`, or None before it was made."""

    def effect(self, state, operation):
        if operation.do == "create":
            return (operation.args["status"], operation.args["touched"])
        if operation.do == "read":
            return state if self._matches(state, operation.value) else REFUSED
        if not isinstance(state, tuple) or state[0] not in (0, 1):
            return REFUSED
        return (2, state[1]) if operation.do == "finish" else (1, operation.args["touched"])

    def drift(self, state, _since, until):
        if isinstance(state, tuple) and state[0] in (0, 1) and state[1] + DAY < until:
            yield "timeout"

    def _matches(self, state, value):
        if value is None or state is None:
            return value is None and state is None
        if value[0] == 3:
            return state == "timeout"
        return state == tuple(value) or (value[0] == 2 and isinstance(state, tuple) and state[0] == 2)

    def blame(self, states, operation):
        """One that has finished may never time out; one that was resumed, not yet."""
        finished = any(isinstance(state, tuple) and state[0] == 2 for state in states)
        return "P11" if finished else super().blame(states, operation)


class Artifact(Model):
    """An artifact: (when it expires, locked, type), or None where there is none."""

    def effect(self, state, operation):
        args = operation.args
        if operation.do == "create":
            return (args["expires"], args["locked"], args["type"])
        if operation.do == "read":
            return state if state == (operation.value and tuple(operation.value)) else REFUSED
        if state is None:
            return REFUSED
        if operation.do == "extend":
            return (args["expires"], *state[1:])
        return (state[0], args["locked"], state[2])

    def drift(self, state, _since, until):
        if state is not None and state[0] is not None and state[0] < until and state[1] == 0 and state[2] != 3:
            yield None


class Upload(Model):
    """An upload: (pending, since), `completed`, `reaped`, `forgotten` by an emptied Redis, or None before.

    Where Redis goes back, one that was reaped stays so: its object is gone, and `complete` may
    never say True for it.  One that was completed may be registered again: (completed, since).
    """

    server = "redis"

    def __init__(self, emptied):
        self._emptied = emptied

    def effect(self, state, operation):
        if operation.do == "prepare":
            return ("pending", int(operation.began))
        if operation.do == "read":
            return state if (operation.value == "pending") == isinstance(state, tuple) else REFUSED
        if not isinstance(state, tuple):
            return REFUSED
        return "completed" if operation.do == "complete" else (state[0], operation.args["since"])

    def returned(self, kept, present):
        return {self._again(before, now) for before in kept for now in present}

    def _again(self, before, now):
        if now in ("reaped", before):
            return now
        if now == "completed" or (isinstance(now, tuple) and now[0] == "completed"):
            return ("completed", before[1]) if isinstance(before, tuple) else "completed"
        return before if before is not None or now is None else "forgotten"

    def drift(self, state, since, until):
        if isinstance(state, tuple):
            if state[1] + UPLOAD < until:
                yield "reaped" if state[0] == "pending" else "completed"
            if any(began <= until and ended >= since for began, ended in self._emptied):
                yield "forgotten"


class Ref(Model):
    """A ref: its value, None if there is none, and its open deletions: their ids, and their values (`*`: any).

    Refs are on disk and do not go back with any server.  The deletions do.  A ref whose deletion is undone may still be
    deleted, because a worker may have read it before.  A deletion that is open again, after it was closed, may delete
    its ref once more.
    """

    start = (None, frozenset())
    server = None

    def __init__(self, is_undone):
        self._is_undone = is_undone

    def gone(self, state):
        return state[0] is None

    def effect(self, state, operation):
        value, listed = state
        if operation.do == "push":
            return (operation.args["oid"], listed)
        if operation.do == "list":
            return (value, listed | {(operation.args["id"], operation.args["expected"] or "*")})
        if operation.do == "close":
            left = frozenset(one for one in listed if one[0] != operation.args["id"])
            return state if self._is_undone(operation) else (value, left)
        return state if value == operation.value else REFUSED

    def drift(self, state, _since, _until):
        value, listed = state
        if value is not None and {value, "*"} & {expected for _, expected in listed}:
            yield (None, listed)


def _number(value):
    return float("inf") if value == "never" else value


class Walk:
    """What may have become of one subject, from operation to operation, and the first of them that cannot be true."""

    def __init__(self, subject, operations, model, returns):
        self.subject = subject
        self.broken = None
        """The property that is broken, and the sentence that says how."""
        self.came_back = False
        """It may have gone, and was there again because its server went back."""
        self._model = model
        self._states, self._since = {model.start}, float("-inf")
        self._kept = {}
        moments = ((one, at) for one in returns for at in ("kept", "returned"))
        self._moments = sorted(moments, key=lambda moment: getattr(*moment))
        for operation in operations:
            if not self._take(operation):
                return

    def _take(self, operation):
        while self._moments and getattr(*self._moments[0])[1] < operation.began:
            self._pass(self._moments.pop(0))
        beside = []
        while self._moments and getattr(*self._moments[0])[0] <= operation.ended:
            beside.append(self._moments.pop(0))
        before, after = self._copy(), []
        # Nobody knows whether it came before or after what was done to its server at the same time.
        for place in range(len(beside) + 1):
            self._put(before)
            for moment in beside[:place]:
                self._pass(moment)
            seen = set(self._states)
            self._step(operation)
            if not self._states:
                continue
            for moment in beside[place:]:
                self._pass(moment)
            after.append(self._copy())
        if not after:
            self._blame(seen, operation)
            return False
        self._put(_both(after))
        return True

    def _copy(self):
        return set(self._states), self._since, {one: set(states) for one, states in self._kept.items()}

    def _put(self, standing):
        self._states, self._since, self._kept = standing
        self._states, self._kept = set(self._states), dict(self._kept)

    def _pass(self, moment):
        """Pass a moment at which the server's files were copied, or were those copied again."""
        one, what = moment
        _, until = getattr(one, what)
        may_be = self._drifted(self._states, until)
        if what == "kept":
            self._kept[one] = may_be
            return
        self.came_back |= any(map(self._model.gone, may_be)) and not all(map(self._model.gone, self._kept[one]))
        self._states, self._since = self._model.returned(self._kept[one], may_be), until

    def _drifted(self, states, until):
        return states | {other for state in states for other in self._model.drift(state, self._since, until)}

    def _step(self, operation):
        model = self._model
        states = self._drifted(self._states, operation.ended)
        self._since = operation.began
        answers = {state: model.effect(state, operation) for state in states}
        done = {after for after in answers.values() if after is not REFUSED}
        refused = {state for state, after in answers.items() if after is REFUSED}
        after = {"ok": done, "no": refused, "failed": states, "maybe": states | done}[operation.outcome]
        if operation.outcome == "maybe":
            # What is done late may already have been followed by what forgekeeper may do then.
            after = after | self._drifted(done, operation.ended)
        self._states = after

    def _blame(self, states, operation):
        seen = f"{operation.do} {operation.args or ''} was answered {operation.outcome}: {operation.value}"
        may_be = sorted(map(str, states))
        self.broken = (
            self._model.blame(states, operation),
            f"{self.subject}: {seen} at {operation.ended:.3f}, but it can only have been {may_be}",
        )


def _both(standings):
    """Put together what may be, whichever way it went."""
    kept = defaultdict(set)
    for _, _, found in standings:
        for one, states in found.items():
            kept[one] |= states
    return set().union(*(states for states, _, _ in standings)), min(since for _, since, _ in standings), kept
