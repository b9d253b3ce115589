"""The properties: each is a function whose first sentence is the property.

What it does not check, and why, stands below that sentence.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from datetime import datetime
from inspect import isfunction
from itertools import pairwise

from tests.harness.waiting import scale_timeout

from .models import DAY, UPLOAD, Upload
from .rights import REFUSALS

OLD_TRANSACTION = 10.0
MOST_LOSSES = 3
EARLY = 2.5
"""How far a scheduler's clock may be ahead of the database's when it claims a tick."""
BOUND = 10.0
"""What was due so many seconds before the end of the drain must have been done."""
CLOSED = {"succeeded", "failed", "skipped", "coalesced", "missed", "blocked"}
OPEN = {"claimed", "enqueued", "started"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
        # What is malformed was planted without an object; it is given up at once, for a person to look at.
        whole = (member for member in register[name] if not any(ord(character) < 32 for character in member))
        yield from (f"the upload {member} lies in {name}" for member in whole)
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


def _refs_left(evidence):
    final = evidence.final
    seen_closed = {str(one.args["id"]) for _, done in evidence.of("ref") for one in done if one.do == "close"}
    for number, (subject, expected, status, reason) in final.requests.items():
        value = final.refs.get(subject)
        if status == 1:
            yield f"the deletion {number} of {subject} is pending"
        elif number not in seen_closed and value is not None and value == (expected or value):
            yield f"{subject} is at {value} as it was when it was listed, but its deletion {number} is closed: {reason}"
    for subject, operations in evidence.of("ref"):
        for operation in operations:
            listed = (operation.do, operation.outcome) == ("list", "ok") and not evidence.undone("postgres", operation)
            if listed and str(operation.args["id"]) not in final.requests:
                yield f"the deletion {operation.args['id']} of {subject} is gone"


def nothing_that_should_live_is_deleted(evidence):
    """P2: nothing is deleted, timed out or reaped that a user has kept, extended, resumed, completed or made anew.

    While its deletion is pending, a ref is made anew at another value than the one listed: at the same, git cannot tell
    them apart.  Once the deletion is closed, the ref stays at any value.
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

    That a closed row never changes is not looked at here: there are too many rows to read them all ten times a second.
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
        if silent > period + scale_timeout(EARLY):
            yield f"{batch} had no tick for {silent:.1f} s in the end"
    yield from _endings(evidence)
    # A busy machine was given more than these seconds: what was too late is never.
    if math.inf in evidence.recoveries:
        yield f"after the faults had stopped some batch did not succeed for {evidence.slowest_recovery:.0f} s"


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
    yield from _unless_seen(evidence, "half entity", "entities {entities} were half timed out")
    yield from (f"entity {number} is half timed out" for number in evidence.final.half_entities)
    yield from _broken(evidence, "P11")


def counters_count_effects(evidence):
    """P12: while a worker lives its counters never fall, and those of workers that nobody kills equal what was done.

    Those of the others cannot be compared: what they had counted goes with their page.
    """
    yield from _unless_seen(evidence, "counter", "{name} fell from {was} to {is}")
    for record, count in evidence.final.effects.items():
        counted = evidence.final.counted.get(record, 0)
        if counted != count:
            yield f"{counted:g} of {record} were counted, and {count} changed"
    if not evidence.final.effects:
        yield "nobody has compared counts with effects"


def no_crippled_process_lives(evidence):
    """P13: a process that has lost a thread, or its master, does not live for another minute."""
    yield from _unless_seen(evidence, "threads", "a process of {service} had {threads} threads")
    yield from (f"processes of {seen['service']} outlived their master" for seen in evidence.samples.get("orphans", ()))


def poison_is_contained(evidence):
    """P14: nothing takes more than three workers down with it."""
    for run in evidence.final.runs:
        if run["losses"] > MOST_LOSSES or (run["losses"] == MOST_LOSSES and run["state"] != "failed"):
            yield f"run {run['id']} of {run['batch']} is {run['state']} after {run['losses']} losses"
    yield from _unless_seen(evidence, "starts", "{message} was started {count} times")


def logs_are_clean(evidence):
    """P15: no log and no page of metrics has a secret in it, or a control character of a user's."""
    for log in evidence.logs:
        data = log.read_bytes()
        for secret in evidence.secrets:
            if secret.encode() in data:
                yield f"{log.name} has a secret in it"
        if found := set(CONTROL.findall(data.decode(errors="replace"))):
            yield f"{log.name} has control characters in it: {sorted(map(ascii, found))}"
    if not evidence.logs:
        yield "there are no logs"
    yield from _unless_seen(evidence, "page", "the page of {service} has a secret in it")


def due_work_is_done_in_time(evidence):
    """P16: what is due when faults have stopped is done a minute later, of each batch, by the processes they left.

    What waits for its next try, as a child that failed or an object that could not be deleted,
    is not due.  The minute grows by the seconds for which the machine held the processes up.
    """
    late = "{batch}: of {due} that were due {count} were left {seconds:.0f} s after the last fault: {left}"
    yield from _unless_seen(evidence, "late", late)


def processes_end_when_asked(evidence):
    """P17: a process that gets SIGTERM has ended after SHUTDOWN_TIMEOUT, whatever is away; nobody has to kill it."""
    yield from _unless_seen(evidence, "outlived", "{service} lived {seconds:.0f} s after its SIGTERM: {who}")


def nobody_is_refused(evidence):
    """P0: nobody lacks a right: neither PostgreSQL nor Redis refuses what a process or a command asks for.

    Each has only what docs/security.md lists.
    """
    yield from (seen["sentence"] for seen in evidence.samples.get("refused", ()))
    for log in evidence.logs:
        found = [line for line in log.read_text(errors="replace").splitlines() if REFUSALS.search(line)]
        if found:
            yield f"{log.name} tells {len(found)} times of something that was refused: {found[0][:500]}"


def _broken(evidence, name):
    broken = (walk.broken for walk in evidence.walks.values() if walk.broken)
    yield from (sentence for blamed, sentence in broken if blamed == name)


def _unless_seen(evidence, kind, sentence):
    yield from map(sentence.format_map, evidence.samples.get(kind, ()))
    yield from _looked_at(evidence, kind)


def _looked_at(evidence, kind):
    if not evidence.looked[kind]:
        yield f"nobody has looked for: {kind}"


NUMBER = re.compile(r"P\d+(?=: )")
PROPERTIES = {
    NUMBER.match(holds.__doc__)[0]: holds
    for holds in list(globals().values())
    if isfunction(holds) and NUMBER.match(holds.__doc__ or "")
}
"""By number, as the first sentence of each has it."""


def check(evidence):
    """Return what breaks each property, as sentences."""
    return {name: list(holds(evidence)) for name, holds in PROPERTIES.items()}
