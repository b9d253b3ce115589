"""Pause, stop, resume and release batches. These commands need PostgreSQL, but no Redis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from shlex import quote
from typing import Annotated, Any, NamedTuple

import peewee as pw
import typer

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.cli import standby
from forgekeeper.cli.connection import batch_named, connect_command, describe_with_remedy
from forgekeeper.cli.running import BatchNames, OptionalReason
from forgekeeper.cli.terminal import (
    FAILED_STATUS,
    HELD_STATUS,
    TIME_EXAMPLES,
    All,
    Json,
    err,
    format_time,
    print_answer,
    print_json,
    print_sentences,
    read_time,
    wrong_use,
)
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import GUARD_HOLD_KINDS, KINDS_BY_PEOPLE, Hold, Kind, describe_obstacles
from forgekeeper.ledger.holds import Batch as BatchRow
from forgekeeper.platform.database import database, now
from metrics.logs import clean_input

FIRST_MIGRATION = "0001_ledger"
"""First migration: a command that applies it creates a new installation."""

UntilOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help=f"Time at which it ends by itself, in UTC: {TIME_EXAMPLES}; by default never."),
]

ReplaceOption = Annotated[bool, typer.Option("--replace", help="Replace your own hold, even if it would last longer.")]


def pause(
    batches: BatchNames = None,
    everything: All = False,
    *,
    until: UntilOption = None,
    replace: ReplaceOption = False,
    at_once: Annotated[
        bool, typer.Option("--now", help="Also end current runs before their next chunk, as `stop` does.")
    ] = False,
    reason: OptionalReason = None,
    json: Json = False,
) -> None:
    """Start no run of these batches until TIME, or until resumed.  Current runs continue.

    Your own pause is kept if it ends later, unless --replace is given.
    """
    if at_once:
        stop(batches, everything, reason=reason, until=until, replace=replace, json=json)
    else:
        _hold_and_print("pause", _select_names(batches, everything), until, reason, replace=replace, json=json)


def stop(
    batches: BatchNames = None,
    everything: All = False,
    *,
    reason: OptionalReason = None,
    until: UntilOption = None,
    replace: ReplaceOption = False,
    json: Json = False,
) -> None:
    """End every run and child of these batches before its next chunk, on all machines; start no run until resumed.

    It works within five seconds, even without Redis; `status` and `processes` show remaining work.  It needs a
    --reason.  Your own stop is kept if it ends later, unless --replace is given.
    """
    names = _select_names(batches, everything)
    if not (reason or "").strip():
        wrong_use("give a --reason: other people need to know why the batches are stopped")
    _hold_and_print("stop", names, until, reason, replace=replace, json=json)


def resume(
    batches: BatchNames = None,
    everything: All = False,
    *,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="End the pauses and stops of this person.")] = None,
    reason: OptionalReason = None,
    json: Json = False,
) -> None:
    """End your own pauses and stops of these batches, or with --by another person's.

    Other people's holds are kept and named, with exit status 3.  `forgekeeper release` releases a batch that is new or
    that the circuit breaker holds.
    """
    names = _select_names(batches, everything)
    with connect_command("resume", redis_needed=False):
        lifted = resume_batches(names, by=by, reason=reason)
    print_sentences(lifted.describe_refusals(), err)
    ended, left = lifted.ended, lifted.left
    if json:
        _print_answers(
            [
                {"batch": name, "ended": _list_hold_facts(ended[name]), "left": _list_hold_facts(left[name])}
                for name in left
            ]
        )
    else:
        print_sentences(lifted.describe_changes())
    if lifted.refused:
        raise typer.Exit(FAILED_STATUS)
    if any(hold.kind in KINDS_BY_PEOPLE for holds in left.values() for hold in holds):
        raise typer.Exit(HELD_STATUS)


def release(
    reason: Annotated[str, typer.Option(help="The reason, for the audit.")],
    batches: BatchNames = None,
    everything: All = False,
    expect: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of records to delete; by default the due records."),
    ] = None,
    json: Json = False,
) -> None:
    """Release batches that are new or that the circuit breaker holds, from their next tick, for the records due now.

    It prints the number of these records.  Runs delete no more by the release, even if more become due: then a run ends
    with `stopped: release_used_up`.  If nothing is due, the release has no number.  The number may be larger than in
    the preview that you have seen: --expect sets the number for each batch.  A release ends with the first run that the
    circuit breaker would have allowed.  Other batches are left unchanged.  A batch whose records cannot be counted now
    stays held, with exit status 3.  In a new installation the objects of artifacts are released with the artifacts.
    """
    names = _select_names(batches, everything)
    if not reason.strip():
        wrong_use("give a --reason, for the audit")
    with connect_command("release", redis_needed=False):
        done = release_batches(names, expect=expect, reason=reason)
        said = "\n".join(done.describe_changes())
    facts = {"released": [*done.released], "expect": done.released, "still_held": done.uncounted, "reason": reason}
    print_answer(facts, said, json=json)
    print_sentences(done.describe_refusals(), err)
    if done.uncounted:
        raise typer.Exit(HELD_STATUS)


def _hold_and_print(
    kind: Kind, names: list[str] | None, until: str | None, reason: str | None, *, replace: bool, json: bool
) -> None:
    """Add the hold to each batch and print the result."""
    # A stop must work in an emergency, even if a migration of another version is pending.
    with connect_command(kind, migrated=kind != "stop", redis_needed=False):
        held = hold_batches(kind, names, until=until, reason=reason, replace=replace)
        warning = standby.describe_missing_standby()
    print_sentences([*held.describe_refusals(), *([warning] if warning else [])], err)
    if json:
        _print_answers([{"batch": name, held.word: True} | held.hold_facts(name) for name in held.done])
    else:
        print_sentences(held.describe_changes())
    if held.refused:
        raise typer.Exit(FAILED_STATUS)


class HoldResult(NamedTuple):
    """Batches that were held, holds that stayed, and batches that refused the hold.

    *word* is "paused" or "stopped", *until* the end of the new holds. *kept* maps a batch to its own hold that ends
    later and therefore stayed.
    """

    done: list[str]
    word: str
    until: datetime | None
    reason: str | None
    kept: dict[str, Hold]
    refused: dict[str, str]

    def hold_facts(self, name: str) -> dict[str, Any]:
        """Return the end of the batch's hold and its reason."""
        hold = self.kept.get(name)
        return {"until": hold.until, "reason": hold.reason} if hold else {"until": self.until, "reason": self.reason}

    def describe_changes(self) -> list[str]:
        """Return a sentence with the end of the hold for each held batch."""
        return [self._describe_new_hold(name) for name in self.done]

    def _describe_new_hold(self, name: str) -> str:
        until = self.hold_facts(name)["until"]
        end = format_time(until) if until else f"`forgekeeper resume {name}`"
        if hold := self.kept.get(name):
            because = f" ({hold.reason})" if hold.reason else ""
            shorten = f"`forgekeeper {hold.kind} {name} --replace` with your --until shortens that"
            return f"{name} is already {self.word} until {end}{because}; {shorten}"
        return f"{name} is {self.word} until {end}"

    def describe_refusals(self) -> list[str]:
        """Return a sentence with the error for each batch that is not held."""
        return [f"{name} is not {self.word}: {why}" for name, why in self.refused.items()]


class ResumeResult(NamedTuple):
    """*ended* holds and *left* holds by batch, and the errors of refused batches."""

    ended: dict[str, list[Hold]]
    left: dict[str, list[Hold]]
    refused: dict[str, str]

    def describe_changes(self) -> list[str]:
        """Return sentences about ended holds, remaining holds, and the command that ends them."""
        return [said for name, left in self.left.items() for said in _describe_resumed(name, self.ended[name], left)]

    def describe_refusals(self) -> list[str]:
        """Return a sentence with the error for each batch that stayed unchanged."""
        return [f"{name} is not resumed: {why}" for name, why in self.refused.items()]


class ReleaseResult(NamedTuple):
    """Result of a release: *released* batches with the number of records that each may delete.

    *unheld* batches had neither a `breaker` nor a `new` hold. *uncounted* batches stay held, because their due records
    could not be counted. *blocked* has a sentence for each batch whose last run was blocked. *left* are followers of
    the released batches that stay held, because they have due records.
    """

    released: dict[str, int]
    unheld: list[str]
    uncounted: list[str]
    blocked: dict[str, str]
    left: list[str]

    def describe_changes(self) -> list[str]:
        """Return a sentence for each batch: released, still blocked, not held, or left held."""
        said = dict.fromkeys(self.unheld, "is neither new nor held by the circuit breaker: there is nothing to release")
        for name, number in self.released.items():
            limit = f"at most {number:,} records may be deleted"
            if number == 0:
                limit = "nothing is due now, so the release has no number: the circuit breaker checks each run"
            if BATCHES[name].writes is not None:
                limit = "it writes by itself, so nothing limits its deletions"
            again = "runs again from its next tick"
            if name in self.blocked:
                again = f"is released, and blocked until this is solved: {self.blocked[name]}"
            said[name] = f"{again}; {limit}"
        said |= dict.fromkeys(self.left, "stays held: it has due records that nobody has previewed")
        return [f"{name} {said[name]}" for name in BATCHES if name in said]

    def describe_refusals(self) -> list[str]:
        """Return a sentence for each batch that stays held."""
        uncounted = "is still held: its due records cannot be counted now; give their number with --expect"
        return [f"{name} {uncounted}" for name in self.uncounted]


def hold_batches(
    kind: Kind, names: list[str] | None, *, until: str | None, reason: str | None, replace: bool = False
) -> HoldResult:
    """Hold these batches, or all if *names* is None, and record it in the audit.

    Each batch has a transaction of its own. A hold of the same kind by the same person stays if it ends later, unless
    *replace* is set. Needs only a database connection. Raises `Problem` if *until* has passed, and the database's error
    if there is only one batch.
    """
    since = now()
    end = None if until is None else read_time(until, since, ahead=True)
    if end is not None and end <= since:
        wrong_use(f"{format_time(end)} has passed; give a future time, in UTC")

    kept: dict[str, Hold] = {}

    def add_hold(name: str) -> None:
        standby.commit_without_standby()
        before = _audit_state(name)
        if hold := Hold.add(name, kind, reason=reason, by=acts.name_actor(), since=since, until=end, replace=replace):
            kept[name] = hold
        acts.record_act(kind, name, batch=name, reason=reason, before=before, after=_audit_state(name))

    done, refused = _apply_to_each(expand_names(names), add_hold)
    return HoldResult(done, "paused" if kind == "pause" else "stopped", end, reason, kept, refused)


def resume_batches(
    names: list[str] | None, *, by: str | None, reason: str | None, seen: Collection[int] | None = None
) -> ResumeResult:
    """End the pauses and stops that one person set on these batches, and record it.

    The person is *by*, or the current user if *by* is None. *seen* limits the holds to the ids that the person has
    looked at. Needs only a database connection. Raises the database's error if there is only one batch.
    """
    ended: dict[str, list[Hold]] = {}

    def lift_holds(name: str) -> None:
        before = _audit_state(name)
        ended[name] = Hold.lift(name, KINDS_BY_PEOPLE, by=clean_input(by or acts.name_actor()), among=seen)
        acts.record_act("resume", name, batch=name, reason=reason, before=before, after=_audit_state(name))

    done, refused = _apply_to_each(expand_names(names), lift_holds)
    return ResumeResult(ended, {name: Hold.list_active(batch=name) for name in done}, refused)


def release_batches(names: list[str] | None, *, expect: int | None, reason: str) -> ReleaseResult:
    """Lift the `breaker` and `new` holds of these batches, and record it in the audit.

    Each batch may delete *expect* records, or as many as are due now. If *names* is None, all batches that delete are
    released. A batch whose due records cannot be counted stays held unless *expect* is given. In a new installation,
    batches declared with `released_with` follow. Needs a database connection.
    """
    blocked = {row.name: str(row.blocked_sentence).rstrip(". ") for row in BatchRow.list_blocked()}
    done = ReleaseResult({}, [], [], blocked, [])
    for batch in BATCHES.values():
        if not (batch.deletes_records if names is None else batch.name in names):
            continue
        held = Hold.list_active(*GUARD_HOLD_KINDS, batch=batch.name)
        number = breaker.count_due(batch, now()) if held and expect is None else expect
        if not held:
            done.unheld.append(batch.name)
        elif number is None:
            done.uncounted.append(batch.name)
        elif _release_batch(batch.name, number, reason=reason):
            done.released[batch.name] = number
        else:
            done.unheld.append(batch.name)
    for batch in find_followers(done.released):
        if breaker.count_due(batch, now()) == 0 and _release_batch(batch.name, 0, reason=reason):
            done.released[batch.name] = 0
        else:
            done.left.append(batch.name)
    return done


def find_followers(names: Collection[str]) -> list[BatchSpec]:
    """Return batches held as `new` whose `released_with` is in *names*, without *names*."""
    held = {hold.batch for hold in Hold.list_active("new")} - set(names)
    return [batch for batch in BATCHES.values() if batch.name in held and batch.released_with in names]


def _apply_to_each(names: Sequence[str], do: Callable[[str], None]) -> tuple[list[str], dict[str, str]]:
    """Call *do* for each batch in its own transaction; return batches done, and errors."""
    done, refused = [], {}
    for name in names:
        try:
            with database.atomic():
                do(name)
        except pw.PeeweeException as error:
            if len(names) == 1 or (said := describe_with_remedy(error)) is None:
                raise
            refused[name] = said
        else:
            done.append(name)
    return done, refused


def describe_holds(names: list[str] | None) -> Iterator[str]:
    """Yield sentences about the holds of these batches; of all held batches if None."""
    for name in names or sorted({hold.batch for hold in Hold.list_active()}):
        yield from describe_obstacles(name)


def _select_names(batches: Sequence[str] | None, everything: bool) -> list[str] | None:
    """Return the named batches without duplicates, or None for all batches."""
    if bool(batches) == everything:
        wrong_use("name the batches, or use --all")
    return None if everything else list(dict.fromkeys(batch_named(name).name for name in batches or ()))


def expand_names(names: list[str] | None) -> list[str]:
    """Return *names*; if None, all batches, including batches of other processes."""
    if names is not None:
        return names
    others = {row.name for row in BatchRow.select()} | {hold.batch for hold in Hold.list_active()}
    return list(dict.fromkeys([*BATCHES, *sorted(others)]))


def _audit_state(name: str) -> dict[str, Any]:
    """Return the current holds of a batch in the form of the audit."""
    return {"holds": _list_hold_facts(Hold.list_active(batch=name))}


def _list_hold_facts(holds: Sequence[Hold]) -> list[dict[str, Any]]:
    fields = ("id", "kind", "reason", "by", "since", "until")
    return [{field: getattr(hold, field) for field in fields} for hold in holds]


def _describe_resumed(name: str, ended: list[Hold], left: list[Hold]) -> Iterator[str]:
    yield from (f"{name}: ended {_describe_hold(hold)}" for hold in ended)
    for hold in left:
        if hold.kind in KINDS_BY_PEOPLE:
            yield f"{name} is held by {_describe_hold(hold)}; `forgekeeper resume {name} --by {quote(hold.by)}` ends it"
    if any(hold.kind in GUARD_HOLD_KINDS for hold in left):
        yield f"{name} is held: `forgekeeper release {name} --reason ...` releases it"
    elif not left:
        yield f"{name} runs again from its next tick" if ended else f"{name} was not paused"


def _describe_hold(hold: Hold) -> str:
    until = f", until {format_time(hold.until)}" if hold.until else ""
    because = f" ({hold.reason})" if hold.reason else ""
    return f"the {hold.kind} of {hold.by} since {format_time(hold.since)}{until}{because}"


def _print_answers(answers: list[dict[str, Any]]) -> None:
    """Print an object if there is one batch, else a list."""
    print_json(answers[0] if len(answers) == 1 else {"batches": answers})


def _release_batch(name: str, expect: int, *, reason: str) -> bool:
    """Release the batch and record it; return False if it was not held."""
    with database.atomic():
        lifted = breaker.release_batch(name, reason=reason, by=acts.name_actor(), expect=expect)
        if lifted:
            (hold, *_) = lifted
            before = {"held": format_time(hold.since), "reason": hold.kind, "sentence": hold.reason}
            after = {"held": None, "expect": expect}
            acts.record_act("release", name, batch=name, reason=reason, before=before, after=after)
    return bool(lifted)


def list_deleting_batches() -> list[str]:
    """Return the names of the batches that delete."""
    return [batch.name for batch in BATCHES.values() if batch.deletes_records]


def find_added_batches() -> list[str]:
    """Return the deleting batches that were added to an installation which knows others: it has no row of them."""
    known = {row.name for row in BatchRow.select(BatchRow.name)}
    return [name for name in list_deleting_batches() if known and name not in known]


def hold_new_batches(names: Sequence[str]) -> None:
    """Hold each of the batches as `new`, as nobody has seen its preview yet."""
    if names:
        BatchRow.register(names)
    for name in names:
        sentence = (
            f"nobody has previewed its deletions yet: `forgekeeper run {name} --dry-run` shows them,"
            f" `forgekeeper release {name} --reason REASON` releases it"
        )
        Hold.add(name, "new", reason=sentence, by=acts.name_actor())
