"""What users did, what was seen meanwhile, how things stood in the end; and whether all of that can be true.

A history is a file of JSON lines.  Each operation is two of them, an intent and a result, so
that one whose end nobody saw counts as *maybe*.  The checker keeps, for each thing that
users own, every state in which it may be: what the users did and what forgekeeper was then
allowed to do.  What is observed must be one of them.  Times are the database's, in seconds.

A server may go back to what it knew at an earlier moment, when its files were copied.  Then
whatever rows, or the register, have said in between is undone, and the states are those of
that moment again; what cannot be undone stays: objects are not there again, and refs.

Each property is a function whose first sentence is the property; what it does not check, and
why, stands below it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise

from .rights import REFUSALS

DAY, UPLOAD = 24 * 3600, 3 * 3600
"""After so many seconds an import is stale, and an upload."""
OLD_TRANSACTION = 10.0
MOST_LOSSES = 3
EARLY = 2.5
"""How far a scheduler's clock may be ahead of the database's when it claims a tick."""
BOUND = 10.0
"""What was due so many seconds before the end of the drain must have been done."""
CLOSED = {"succeeded", "failed", "skipped", "coalesced", "missed", "blocked"}
OPEN = {"claimed", "enqueued", "started"}
REFUSED = object()
"""In place of a state: the operation would have been answered with no."""


class History:
    """The file that operations and samples are written to, from any thread, as they happen."""

    def __init__(self, path):
        self.path = path
        self.looked = Counter()
        self.done = Counter()
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._number = 0

    def intend(self, subject, do, args, *, at):
        """Note what is about to be done; return its number."""
        with self._lock:
            self._number += 1
            self._write({"id": self._number, "subject": subject, "do": do, "args": args, **_times(at)})
            return self._number

    def result(self, number, subject, do, outcome, *, at, value=None):
        """Note what came of it: ok, no, failed (not done, whatever the state) or maybe."""
        with self._lock:
            self.done[f"{subject.partition(':')[0]} {do}", outcome] += 1
            self._write({"id": number, "outcome": outcome, "value": value, **_times(at)})

    def sample(self, kind, **facts):
        """Note something seen that a property asks about."""
        with self._lock:
            self._write({"sample": kind, **facts, **_times(None)})

    def look(self, kind):
        """Count one look that may or may not have found something: a property that nobody looked at is not kept."""
        self.looked[kind] += 1

    def close(self):
        with self._lock:
            self._file.close()

    def _write(self, record):
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _times(at):
    return {"mono": round(time.monotonic(), 6), "db": time.time() if at is None else at}


@dataclass
class Operation:
    """Something that was done to *subject* between *began* and *ended*."""

    subject: str
    do: str
    args: dict
    began: float
    ended: float = float("inf")
    outcome: str = "maybe"
    value: object = None


def read(path):
    """Return the operations by their subject, in their order, and the samples by their kind."""
    operations, samples = {}, defaultdict(list)
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            if "sample" in record:
                samples[record["sample"]].append(record)
            elif "do" in record:
                operations[record["id"]] = Operation(record["subject"], record["do"], record["args"], record["db"])
            else:
                operation = operations[record["id"]]
                operation.ended, operation.outcome, operation.value = (
                    record[name] for name in ("db", "outcome", "value")
                )
    found = defaultdict(list)
    for operation in operations.values():
        found[operation.subject].append(operation)
    return found, samples


@dataclass
class Final:
    """How things stood when the faults had stopped and everything had had its time.

    Keys are texts, as JSON has them.  *files_then* is what the store held after
    `uploads reconcile`, and what the register and the rows named by then.
    """

    now: float = 0.0
    statuses: dict = field(default_factory=dict)
    """User -> when the status clears itself, None for never."""
    imports: dict = field(default_factory=dict)
    """Subject (`import:1`, `entity:1`) -> [status, when it was touched]."""
    half_entities: list = field(default_factory=list)
    artifacts: dict = field(default_factory=dict)
    """Id -> [when it expires, locked, file type, path]."""
    wrong_statistics: list = field(default_factory=list)
    outbox: list = field(default_factory=list)
    """[path, when it is due, attempts]."""
    register: dict = field(default_factory=lambda: {"pending": {}, "deleting": {}, "failed": {}})
    requests: dict = field(default_factory=dict)
    """Id of a deletion -> [subject of its ref, expected oid, status, reason]."""
    old_requests: int = 0
    refs: dict = field(default_factory=dict)
    """Subject (`ref:1:refs/heads/a`) -> oid."""
    files: list = field(default_factory=list)
    files_then: list = field(default_factory=list)
    named_then: list = field(default_factory=list)
    runs: list = field(default_factory=list)
    """Rows of the ledger, times in seconds."""
    buckets: dict = field(default_factory=lambda: {"available": [], "occupied": [], "max": 0})
    effects: dict = field(default_factory=dict)
    """Record -> how many were changed by the workers that were started after the faults."""
    counted: dict = field(default_factory=dict)
    """Record -> how many those workers have counted."""
    stranded: list = field(default_factory=list)
    """What lay in Redis where no worker would find it, when all had ended."""
    changed_at_rest: list = field(default_factory=list)
    """What further runs changed although there was nothing to do."""


@dataclass
class Evidence:
    """All that a property may ask."""

    operations: dict
    samples: dict
    looked: Counter
    final: Final
    logs: list = field(default_factory=list)
    secrets: tuple = ()
    periods: dict = field(default_factory=dict)
    """Batch -> seconds between two of its ticks."""
    longest: dict = field(default_factory=dict)
    """Batch -> seconds that a run may take: its budget, a chunk and a statement's time-out."""
    recoveries: list = field(default_factory=list)
    slowest_recovery: float = 60.0

    @cached_property
    def walks(self):
        """What the models say of each subject."""
        return {walk.subject: walk for walk in _walks(self)}

    @cached_property
    def emptied(self):
        """When Redis was emptied: pairs of beginning and end."""
        return [(one.began, one.ended) for one in self.done_to("redis", "flush") if one.outcome != "failed"]

    @cached_property
    def returns(self):
        """When a server went back, by its name."""
        return {
            server: [
                Return((keep.began, keep.ended), (back.began, back.ended))
                for keep, back in pairwise(self.done_to(server, "keep", "return"))
                if (keep.do, back.do) == ("keep", "return")
            ]
            for server in ("redis", "postgres")
        }

    def undone(self, server, operation):
        """Say whether that server may have gone back to before the operation."""
        return any(
            operation.ended >= one.kept[0] and operation.began <= one.returned[1] for one in self.returns[server]
        )

    def done_to(self, server, *what):
        """Return what was done to a server, in its order."""
        return [operation for operation in self.operations.get(server, ()) if operation.do in what]

    def frozen(self, server, began, ended):
        """Say for how many seconds between these moments the server was stopped."""
        spans = ((one.began, one.ended) for one in self.done_to(server, "freeze"))
        return sum(max(0.0, min(last, ended) - max(first, began)) for first, last in spans)

    def lines(self, message):
        """Yield the facts of the log lines with that message; a killed process's last one may be cut."""
        for log in self.logs:
            with log.open(errors="replace") as lines:
                for line in lines:
                    if f'"{message}"' in line:
                        with suppress(ValueError):
                            yield json.loads(line)

    def of(self, kind):
        """Yield the subjects of that kind and their operations."""
        for subject, operations in self.operations.items():
            if subject.partition(":")[0] == kind:
                yield subject, operations


@dataclass(frozen=True)
class Return:
    """A server that went back: between which moments its files were copied, and when it had them again."""

    kept: tuple
    returned: tuple


# What each thing may be


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
    """A ref: its value, None where there is none, and at which values it is listed for deletion (`*`: at any).

    Refs are on disk and do not go back with any server.  The list does; yet a ref whose listing
    is undone may go: whoever works on the list has read it before.
    """

    start = (None, frozenset())
    server = None

    def gone(self, state):
        return state[0] is None

    def effect(self, state, operation):
        value, listed = state
        if operation.do == "push":
            return (operation.args["oid"], listed)
        if operation.do == "list":
            return (value, listed | {operation.args["expected"] or "*"})
        return state if value == operation.value else REFUSED

    def drift(self, state, _since, _until):
        value, listed = state
        if value is not None and listed & {value, "*"}:
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


def _walks(evidence):
    final = evidence.final
    models = {
        "status": (Status(), lambda subject: _status(final, subject)),
        "import": (Import(), final.imports.get),
        "entity": (Import(), final.imports.get),
        "artifact": (Artifact(), lambda subject: _artifact(final, subject)),
        "upload": (Upload(evidence.emptied), lambda subject: _upload(final, subject)),
        "ref": (Ref(), final.refs.get),
    }
    for kind, (model, seen) in models.items():
        for subject, operations in evidence.of(kind):
            last = Operation(subject, "read", {}, final.now, final.now, "ok", seen(subject))
            yield Walk(subject, [*operations, last], model, evidence.returns.get(model.server, ()))


def _status(final, subject):
    user = subject.partition(":")[2]
    if user not in final.statuses:
        return None
    clears = final.statuses[user]
    return "never" if clears is None else clears


def _artifact(final, subject):
    row = final.artifacts.get(subject.partition(":")[2])
    return row and row[:3]


def _upload(final, subject):
    return "pending" if subject.partition(":")[2] in final.register["pending"] else None


# The properties


def nothing_is_lost(evidence):
    """P1: whatever was due when the faults stopped has been dealt with since.

    An upload that Redis has forgotten, emptied or gone back, is not: `uploads reconcile` finds it
    (P4).  Nor is what was due and is undone, as a ref deletion that was listed after the copy.
    """
    final, horizon = evidence.final, evidence.final.now - BOUND
    for user, clears in final.statuses.items():
        if clears is not None and clears <= horizon:
            yield f"status {user} was due at {clears}, and is there"
    for subject, (status, touched) in final.imports.items():
        if status in (0, 1) and touched + DAY < horizon:
            yield f"{subject} is stale since {touched + DAY}, and unfinished"
    for number, (expires, locked, kind, _path) in final.artifacts.items():
        if expires is not None and expires < horizon and locked == 0 and kind != 3:
            yield f"artifact {number} has expired at {expires}, and is there"
    for path, due, attempts in final.outbox:
        if due <= horizon:
            yield f"the object {path} waits in the outbox, after {attempts} attempts"
    yield from _uploads_left(evidence, horizon)
    yield from _refs_left(evidence)
    if final.old_requests:
        yield f"{final.old_requests} ref deletions processed days ago have not been pruned"
    yield from (f"nobody would ever find {message} again" for message in final.stranded)


def _uploads_left(evidence, horizon):
    register, files = evidence.final.register, set(evidence.final.files)
    for member, since in register["pending"].items():
        if since + UPLOAD < horizon:
            yield f"the upload {member} is stale, and pending"
    for name in ("deleting", "failed"):
        for member in register[name]:
            # Planted without an object; given up at once, for a person to look at.
            if not _malformed(member):
                yield f"the upload {member} lies in {name}"
    model = Upload(evidence.emptied)
    named = {path for _, _, _, path in evidence.final.artifacts.values()}
    for subject, operations in evidence.of("upload"):
        path = subject.partition(":")[2].partition(":")[2]
        pending = path not in named and path in files and subject.partition(":")[2] not in register["pending"]
        began = operations[0].began
        certain = all(operation.outcome != "maybe" for operation in operations)
        completed = any((operation.do, operation.outcome) == ("complete", "ok") for operation in operations)
        forgotten = [*model.drift(("pending", float("inf")), began, evidence.final.now)]
        forgotten += [one for one in operations if one.do == "prepare" and evidence.undone("redis", one)]
        if pending and certain and not completed and not forgotten:
            yield f"the upload {path} was reaped, and its object is there"


def _malformed(member):
    return any(ord(character) < 32 for character in member)


def _refs_left(evidence):
    final = evidence.final
    for number, (subject, expected, status, reason) in final.requests.items():
        value = final.refs.get(subject)
        if status == 1:
            yield f"the deletion {number} of {subject} is pending"
        elif value is not None and value == (expected or value):
            yield f"{subject} is at {value} as it was when it was listed, but its deletion {number} is closed: {reason}"
    for subject, operations in evidence.of("ref"):
        for operation in operations:
            listed = (operation.do, operation.outcome) == ("list", "ok") and not evidence.undone("postgres", operation)
            if listed and str(operation.args["id"]) not in final.requests:
                yield f"the deletion {operation.args['id']} of {subject} is gone"


def nothing_that_should_live_is_deleted(evidence):
    """P2: nothing is deleted, timed out or reaped that a user has kept, extended, resumed, completed or made anew.

    A ref made anew is always at another value than the one listed: at the same, git cannot tell them apart.
    """
    yield from _broken(evidence, "P2")


def every_row_has_its_object(evidence):
    """P3: an object is never missing while a row of an artifact names it.

    But where PostgreSQL went back to before the artifact was destroyed: its row is there again,
    and nothing brings its object.
    """
    came_back = {subject for subject, walk in evidence.walks.items() if walk.came_back}
    for seen in evidence.samples.get("missing", ()):
        if f"artifact:{seen['artifact']}" not in came_back:
            yield f"artifact {seen['artifact']}: {seen['path']} was gone"
    yield from _looked_at(evidence, "missing")
    files = set(evidence.final.files)
    for number, (*_, path) in evidence.final.artifacts.items():
        if path not in files and f"artifact:{number}" not in came_back:
            yield f"artifact {number} names {path}, which is gone"


def no_object_is_orphaned(evidence):
    """P4: the objects of artifacts go with them, and after `uploads reconcile` none is left that nothing names.

    An artifact that PostgreSQL forgot when it went back is not destroyed: only reconcile finds its object.
    """
    present, files = evidence.final.artifacts, set(evidence.final.files)
    for subject, (first, *_) in evidence.of("artifact"):
        gone = first.outcome == "ok" and subject.partition(":")[2] not in present
        if gone and not evidence.undone("postgres", first) and first.args["path"] in files:
            yield f"{subject} is gone, and its object {first.args['path']} is there"
    for path in sorted(set(evidence.final.files_then) - set(evidence.final.named_then)):
        yield f"{path} is named by nothing"


def one_trusted_holder(evidence):
    """P5: a bucket or a lease has one holder, and who has lost it never has it again.

    Seen in Redis: a token that was followed by another and comes back has changed something
    as a stale holder.  That two processes never *believe* that they hold one cannot be seen
    from outside; the state machines of tests/coordination check that.  Where Redis went back
    it knows the holders of that moment again, and counts from there; what is seen while it goes back may be of either.
    """
    lost = defaultdict(set)
    present = {}
    returned = [instant for one in evidence.returns["redis"] for instant in one.returned]
    for seen in evidence.samples.get("holders", ()):
        while returned and returned[0] <= seen["db"]:
            returned.pop(0)
            lost.clear()
            present = {}
        for name, token in seen["holders"].items():
            if token in lost[name]:
                yield f"{name} is held again by {token}, who had lost it"
            if name in present and present[name] != token:
                lost[name].add(present[name])
        for name in present.keys() - seen["holders"].keys():
            lost[name].add(present[name])
        tokens = Counter(seen["holders"].values())
        yield from (f"{token} holds {count} at once" for token, count in tokens.items() if count > 1)
        if both := set(seen.get("available", ())) & {name.partition(" ")[2] for name in seen["holders"]}:
            yield f"buckets {sorted(both)} were available and held"
        present = seen["holders"]
    yield from _looked_at(evidence, "holders")


def buckets_are_complete(evidence):
    """P6: at rest each bucket below the maximum is in exactly one of available and occupied."""
    buckets = evidence.final.buckets
    found = Counter([*buckets["available"], *buckets["occupied"]])
    if not buckets["max"]:
        yield "nobody has ever tidied the buckets"
    if found != Counter(range(buckets["max"])):
        yield f"of {buckets['max']} buckets there are: {dict(found)}"
    if buckets["occupied"]:
        yield f"buckets {buckets['occupied']} are occupied, and nobody is at work"


def each_tick_once(evidence):
    """P7: each tick has one row, is claimed when it is due, ends once, and new ones run soon after the faults.

    That a closed row never changes is looked at in test_schedulers_survive.py alone: here
    there are too many rows to read them all ten times a second.
    """
    ticks = defaultdict(list)
    for run in evidence.final.runs:
        yield from _one_run(run, evidence.final.now - evidence.slowest_recovery)
        if run["tick"] is not None:
            ticks[run["batch"]].append(run["tick"])
    for batch, period in evidence.periods.items():
        for first, second in pairwise(sorted(ticks[batch])):
            if abs(second - first - period) > 0.001:
                yield f"{batch}: after the tick {first} comes {second}"
        silent = evidence.final.now - max(ticks[batch], default=0.0)
        if silent > period + EARLY:
            yield f"{batch} had no tick for {silent:.1f} s in the end"
    yield from _endings(evidence)
    for seconds in evidence.recoveries:
        if seconds > evidence.slowest_recovery:
            yield f"after the faults had stopped some batch did not succeed for {seconds:.0f} s"


def _one_run(run, horizon):
    if run["state"] not in OPEN | CLOSED:
        yield f"run {run['id']} of {run['batch']} is {run['state']}"
    if run["state"] in OPEN and run["claimed_at"] < horizon:
        yield f"run {run['id']} of {run['batch']} has been {run['state']} since {run['claimed_at']}"
    if run["tick"] is not None and run["claimed_at"] < run["tick"] - EARLY:
        yield f"run {run['id']} of {run['batch']} was claimed {run['tick'] - run['claimed_at']:.1f} s early"


def _endings(evidence):
    """Say which runs did not end as a line of their workers says, if PostgreSQL has not gone back to before it."""
    runs = {run["id"]: run for run in evidence.final.runs}
    finished = defaultdict(list)
    for line in evidence.lines("run finished"):
        at = datetime.fromisoformat(line["at"]).timestamp()
        if not any(one.kept[0] <= at <= one.returned[1] for one in evidence.returns["postgres"]):
            finished[line["run"]].append(line["batch"])
    for number, batches in finished.items():
        run = runs.get(number, {"state": None, "batch": None})
        if len(batches) > 1 or run["state"] != "succeeded":
            yield f"run {number} was closed well {len(batches)} times, and is {run['state']}"
        elif batches != [run["batch"]]:
            yield f"run {number} of {run['batch']} was closed well by a run of {batches[0]}"


def twice_is_once(evidence):
    """P8: what is run again, or by two at once, has the effect of one run.

    Seen in sums that would be taken off twice, in things that came back, and in what further runs
    change where there is nothing to do.
    """
    yield from (f"the statistics of project {project} are wrong" for project in evidence.final.wrong_statistics)
    yield from (f"changed by runs that had nothing to do: {change}" for change in evidence.final.changed_at_rest)
    yield from _broken(evidence, "P8")


def runs_end_in_time(evidence):
    """P9: each run and each child ends within its budget, one chunk and one statement's time-out."""
    for message in ("child finished", "child failed", "run finished", "run failed", "run lost"):
        for line in evidence.lines(message):
            if line["seconds"] > evidence.longest.get(line["batch"], math.inf):
                yield f"{line['message_id']} took {line['seconds']:.1f} s"
    for run in evidence.final.runs:
        if run["state"] == "succeeded" and run["started_at"] and run["batch"] in evidence.longest:
            seconds = run["finished_at"] - run["started_at"]
            if seconds > evidence.longest[run["batch"]]:
                yield f"run {run['id']} of {run['batch']} took {seconds:.1f} s"


def transactions_are_short(evidence):
    """P10: no transaction of ours is older than ten seconds.

    That none is open across a call of git, of a store or of Redis cannot be seen from the
    server: an idle transaction looks the same whatever its owner waits for.  For as long as the
    server is frozen itself, none can end.
    """
    for seen in evidence.samples.get("transaction", ()):
        seconds = seen["seconds"] - evidence.frozen("postgres", seen["db"] - seen["seconds"], seen["db"])
        if seconds > OLD_TRANSACTION:
            yield f"{seen['application']} was {seen['state']} for {seconds:.1f} s"
    yield from _looked_at(evidence, "transaction")


def imports_move_as_they_may(evidence):
    """P11: only what was created or started times out, and an entity's trackers with it, in the same commit."""
    yield from _unless_seen(evidence, "half entity", lambda seen: f"entities {seen['entities']} were half timed out")
    yield from (f"entity {number} is half timed out" for number in evidence.final.half_entities)
    yield from _broken(evidence, "P11")


def counters_count_effects(evidence):
    """P12: while a worker lives its counters never fall, and those of workers that nobody kills equal what was done.

    Those of the others cannot be compared: what they had counted goes with their page.
    """
    yield from _unless_seen(evidence, "counter", lambda seen: f"{seen['name']} fell from {seen['was']} to {seen['is']}")
    for record, count in evidence.final.effects.items():
        counted = evidence.final.counted.get(record, 0)
        if counted != count:
            yield f"{counted:g} of {record} were counted, and {count} changed"
    if not evidence.final.effects:
        yield "nobody has compared counts with effects"


def no_crippled_process_lives(evidence):
    """P13: a process that has lost a thread, or its master, does not live for another minute."""
    yield from (
        f"a process of {seen['service']} had {seen['threads']} threads" for seen in evidence.samples.get("threads", ())
    )
    yield from (f"processes of {seen['service']} outlived their master" for seen in evidence.samples.get("orphans", ()))
    yield from _looked_at(evidence, "threads")


def poison_is_contained(evidence):
    """P14: nothing takes more than three workers down with it."""
    for run in evidence.final.runs:
        if run["losses"] > MOST_LOSSES or (run["losses"] == MOST_LOSSES and run["state"] != "failed"):
            yield f"run {run['id']} of {run['batch']} is {run['state']} after {run['losses']} losses"
    yield from _unless_seen(evidence, "starts", lambda seen: f"{seen['message']} was started {seen['count']} times")


def logs_are_clean(evidence):
    """P15: no log and no page of metrics has a secret in it, or a control character of a user's."""
    for log in evidence.logs:
        data = log.read_bytes()
        for secret in evidence.secrets:
            if secret.encode() in data:
                yield f"{log.name} has a secret in it"
        text = data.decode(errors="replace")
        if found := {character for character in text if _control(character)}:
            yield f"{log.name} has control characters in it: {sorted(map(ascii, found))}"
    if not evidence.logs:
        yield "there are no logs"
    yield from _unless_seen(evidence, "page", lambda seen: f"the page of {seen['service']} has a secret in it")


def due_work_is_done_in_time(evidence):
    """P16: what is due when faults have stopped is done a minute later, of each batch, by the processes they left.

    What waits for its next try, as a child that failed or an object that could not be deleted,
    is not due.  The minute grows by the seconds for which the machine held the processes up.
    """
    for seen in evidence.samples.get("late", ()):
        yield (
            f"{seen['batch']}: of {seen['due']} that were due {seen['count']} were left"
            f" {seen['seconds']:.0f} s after the last fault: {', '.join(map(str, seen['left']))}"
        )
    yield from _looked_at(evidence, "late")


def processes_end_when_asked(evidence):
    """P17: a process that gets SIGTERM has ended after SHUTDOWN_TIMEOUT, whatever is away; nobody has to kill it."""
    yield from _unless_seen(
        evidence,
        "outlived",
        lambda seen: f"{seen['service']} lived {seen['seconds']:.0f} s after its SIGTERM: {'; '.join(seen['who'])}",
    )


def nobody_is_refused(evidence):
    """P0: nobody lacks a right: neither PostgreSQL nor Redis refuses what a process or a command asks for.

    With `--acl` each has only what docs/security.md lists.
    """
    yield from (seen["sentence"] for seen in evidence.samples.get("refused", ()))
    for log in evidence.logs:
        found = [line for line in log.read_text(errors="replace").splitlines() if REFUSALS.search(line)]
        if found:
            yield f"{log.name} tells {len(found)} times of something that was refused: {found[0][:500]}"


def _control(character):
    return (ord(character) < 32 and character not in "\n\t") or 127 <= ord(character) < 160


def _broken(evidence, name):
    broken = (walk.broken for walk in evidence.walks.values() if walk.broken)
    yield from (sentence for blamed, sentence in broken if blamed == name)


def _unless_seen(evidence, kind, describe):
    yield from map(describe, evidence.samples.get(kind, ()))
    yield from _looked_at(evidence, kind)


def _looked_at(evidence, kind):
    if not evidence.looked[kind]:
        yield f"nobody has looked for: {kind}"


PROPERTIES = {
    "P0": nobody_is_refused,
    "P1": nothing_is_lost,
    "P2": nothing_that_should_live_is_deleted,
    "P3": every_row_has_its_object,
    "P4": no_object_is_orphaned,
    "P5": one_trusted_holder,
    "P6": buckets_are_complete,
    "P7": each_tick_once,
    "P8": twice_is_once,
    "P9": runs_end_in_time,
    "P10": transactions_are_short,
    "P11": imports_move_as_they_may,
    "P12": counters_count_effects,
    "P13": no_crippled_process_lives,
    "P14": poison_is_contained,
    "P15": logs_are_clean,
    "P16": due_work_is_done_in_time,
    "P17": processes_end_when_asked,
}


def check(evidence):
    """Return what breaks each property, as sentences."""
    return {name: list(holds(evidence)) for name, holds in PROPERTIES.items()}
