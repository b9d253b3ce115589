"""Dead letters, messages that were given up: look at them, send them anew, remove them (`dead`)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from json import dumps
from typing import Annotated, Any

import structlog
import typer
from rich.progress import track

from forgekeeper.audit import acts
from forgekeeper.batches import CHILDREN, queues
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import All, Json, Problem, emit, err, moment, out, table, wrong_use
from forgekeeper.cli.replay import DONE, Replay
from forgekeeper.connections import client
from forgekeeper.delivery import dead_letters
from forgekeeper.delivery.dead_letters import DeadLetter
from forgekeeper.identity import identity
from forgekeeper.process.broker import broker
from forgekeeper.runs import quarantine
from metrics.redaction import clean, escaped, redact

dead = typer.Typer(help="Dead letters: messages that were given up.")

BRIEF = 60
"""Characters of a cell; `show` has all of it."""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="Its id, as `list` shows it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]

log = structlog.get_logger(__name__)


@dead.callback(invoke_without_command=True)
def dead_default(context: typer.Context, json: Json = False) -> None:
    """List the dead letters when no command is given."""
    if context.invoked_subcommand is None:
        dead_list(json=json)


@dead.command("list")
def dead_list(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, newest first.")] = 100,
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first instead.")] = False,
    json: Json = False,
) -> None:
    """List the messages that were given up, and why."""
    with connected("dead"):
        require_redis()
        found = dead_letters.addresses(broker, queues(), limit=limit, oldest_first=oldest)
        entries = [_entry(letter) for letter in dead_letters.read(broker, found)]
        total = dead_letters.count(broker, queues())
    if json:
        emit({"dead": total, "entries": entries})
        return
    columns = ("queue", "id", "actor", "args", "since", "retries", "reason")
    table("", columns, ([_cell(entry[name]) for name in columns] for entry in entries))
    out.print(f"{total} in all")


@dead.command("show")
def dead_show(letter_id: Annotated[str, typer.Argument(metavar="ID", help="Its id.")], json: Json = False) -> None:
    """Show a dead letter as it lies there, with the trace of its last error."""
    with connected("dead"):
        require_redis()
        letter = _named(letter_id)
    facts = _entry(letter)
    if letter.fault:
        facts |= {"fault": letter.fault, "body": (letter.body or b"").decode(errors="backslashreplace")}
    else:
        message = letter.message
        facts |= {"kwargs": message.kwargs, "sent": _sent(message.message_timestamp), "options": message.options}
    if json:
        emit(facts)
        return
    options = dict(facts.pop("options", {}))
    trace = str(options.pop("traceback", ""))
    for name, value in (facts | options).items():
        out.print(f"{escaped(name)}: {_indented(_text(value))}")
    if trace:
        out.print(f"traceback:\n    {_indented(trace.rstrip())}")


@dead.command("replay")
def dead_replay(
    letter_id: Id = None,
    everything: All = False,
    rate: Annotated[float, typer.Option(min=0.1, max=100_000, help="How many a second, with --all.")] = 100,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Send dead letters anew: a child with all its retries, a batch as a new run by hand."""
    if (letter_id is None) != everything:
        wrong_use("name one dead letter by its id, or say --all")
    kept, runs, replayed = [], [], 0
    with connected("dead"):
        require_redis()
        ids, letters = _chosen(letter_id)
        # One that would be kept is, without an act: what is not recorded is not done.
        replay = Replay(dry=dry_run or (letter_id is not None and _would_be_kept(letters)))
        if ids and not replay.dry:
            acts.record("dead replay", letter_id or "all", after=acts.some(ids))
        for letter in _shown("replaying", len(ids), letters if dry_run else _paced(letters, rate)):
            verdict = replay(letter)
            if letter_id is not None and verdict.kept and verdict.kept not in DONE:
                raise Problem(verdict.sentence)
            if verdict.kept:
                kept.append(verdict._asdict() | {"queue": letter.queue, "id": letter.id})
            replayed += verdict.kept is None
            runs += [verdict.run] if verdict.run else []
    if json:
        emit({"replayed": replayed, "runs": runs, "kept": kept, "dry_run": dry_run})
    elif letter_id is not None:
        out.print(clean(verdict.sentence))
    else:
        for one in kept:
            out.print(clean(one["sentence"]))
        out.print(f"{replayed} {'would be ' if dry_run else ''}replayed, {len(kept)} kept")


@dead.command("purge")
def dead_purge(
    letter_id: Id = None,
    everything: All = False,
    *,
    older_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Those given up so long ago, such as 90m, 12h or 3d.")
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove dead letters for good."""
    if (letter_id is not None) + everything + (older_than is not None) != 1:
        wrong_use("name one dead letter by its id, or say --all or --older-than")
    age = None if older_than is None else _duration(older_than)
    with connected("dead"):
        require_redis()
        ids, letters = _chosen(letter_id, age)
        if ids and not dry_run and not yes:
            _confirm(len(ids))
        if ids and not dry_run:
            acts.record(
                "dead purge", letter_id or (f"older than {older_than}" if age else "all"), before=acts.some(ids)
            )
        purged = len(ids) if dry_run else sum(map(_purge, _shown("purging", len(ids), letters)))
    if json:
        emit({"purged": purged, "dry_run": dry_run})
    else:
        out.print(f"{purged} {'would be ' if dry_run else ''}removed")


def _entry(letter: DeadLetter) -> dict[str, Any]:
    message = None if letter.fault else letter.message
    return {
        "queue": letter.queue,
        "id": letter.id,
        "actor": message and message.actor_name,
        "args": message and message.args,
        "since": letter.since,
        "retries": letter.options.get("retries", 0),
        "reason": letter.reason or letter.fault or "",
    }


def _named(letter_id: str) -> DeadLetter:
    letter = dead_letters.find(broker, queues(), letter_id)
    if letter is None:
        raise Problem(f"{letter_id} is not among the dead letters; `forgekeeper dead list` shows them")
    return letter


def _chosen(letter_id: str | None, age: timedelta | None = None) -> tuple[list[str], Iterable[DeadLetter]]:
    """Return the ids of the letters that are meant, and these: one, or all that lie there now, the oldest first."""
    if letter_id is not None:
        return [letter_id], [_named(letter_id)]
    found = dead_letters.addresses(broker, queues())
    if age is not None:
        seconds, _ = client.time()
        horizon = datetime.fromtimestamp(seconds, UTC) - age
        found = [address for address in found if address.since < horizon]
    return [address.id for address in found], dead_letters.read(broker, found)


def _would_be_kept(letters: Iterable[DeadLetter]) -> bool:
    return any(Replay(dry=True)(letter).kept for letter in letters)


def _purge(letter: DeadLetter) -> bool:
    removed = dead_letters.remove(broker, letter)
    if removed:
        child = CHILDREN.get(_entry(letter)["actor"] or "")
        if child is not None:
            quarantine.end(child.batch.name, child.name, letter.message.message_id)
        log.warning(
            "dead letter purged", id=letter.id, queue=letter.queue, actor=_entry(letter)["actor"], by=identity()
        )
    return removed


def _confirm(total: int) -> None:
    what = "one dead letter" if total == 1 else f"{total} dead letters"
    if not sys.stdin.isatty():
        wrong_use(f"this removes {what} for good; say --yes to confirm it, or --dry-run to see it")
    try:
        answer = err.input(f"Remove {what} for good? [y/N] ", markup=False)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise Problem("nothing was removed")


def _shown(what: str, total: int, letters: Iterable[DeadLetter]) -> Iterable[DeadLetter]:
    return track(letters, what, total, console=err, transient=True, disable=not err.is_terminal or total == 1)


def _paced(letters: Iterable[DeadLetter], rate: float) -> Iterator[DeadLetter]:
    began = time.monotonic()
    for number, letter in enumerate(letters):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield letter


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text.strip())
    if match is None:
        wrong_use(f"{text!r} is no duration; give a number and s, m, h or d, such as 90m, 12h or 3d")
    return timedelta(seconds=int(match[1]) * UNITS[match[2]])


def _indented(text: str) -> str:
    return escaped(text).replace("\n", "\n    ")


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return moment(value)
    # Cut afterwards: of half a secret nobody knows that it is one.
    text = " ".join(clean(_text(value)).split())
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return moment(value)
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # what has no bottom
        return dumps(redact(value), ensure_ascii=False)


def _sent(milliseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None
