"""`quarantine`: list, retry and discard records that failed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

import peewee as pw
import redis
import typer

from forgekeeper.api.batches import all_declared
from forgekeeper.api.shown import Refused
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected, require_redis, sentence
from forgekeeper.cli.terminal import All, Json, Problem, answer, emit, err, group, out, say, table, wrong_use
from forgekeeper.ledger import quarantine as rows
from forgekeeper.ledger.quarantine import KINDS, Quarantined
from forgekeeper.platform.database import database
from forgekeeper.platform.database.looking import looking
from forgekeeper.platform.settings import Settings

Batch = Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="Only of this batch.")]
Kind = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help="Only of this kind: record, child, message, upload, …")
]
Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="Its id, as `list` shows it.")]
Act = Literal["retry", "discard"]
PERSON = "when a person says so"
WORDS: dict[Act, str] = {"retry": "will be tried again", "discard": "discarded"}
STAYS: dict[Act, str] = {
    "retry": "nothing can read it, or a run is at it just now",
    "discard": "it is tried again by itself, and can be discarded once it waits for a person",
}
"""Reason why an act left an entry of the quarantine unchanged."""
MOST = 1_000_000
"""Maximum entries of a kind that an act reads."""


class Found(NamedTuple):
    """An entry of the quarantine. If *retry_at* is None, it waits for a person."""

    id: str
    kind: str
    batch: str
    record: str
    key: str
    error: str
    failures: int
    since: datetime | None
    retry_at: datetime | None


class Kept(NamedTuple):
    """Entries that batches keep themselves, their total, and the errors of unreadable kinds."""

    entries: list[Found]
    total: int
    unknown: dict[str, str]


def quarantine_list(
    batch: Batch = None,
    kind: Kind = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of a kind, oldest first.")] = 100,
    json: Json = False,
) -> None:
    """List what failed and is left out, how often, why, and when it is tried again."""
    with connected("quarantine") as settings:
        rows = [_row(row) for row in Quarantined.oldest_first(batch=batch, kind=kind).limit(limit)]
        kept = kept_by_documents(settings, batch, kind, limit)
        found, total = [*rows, *kept.entries], count(batch, kind) + kept.total
    if json:
        emit({"total": total, "entries": [one._asdict() for one in found], "unknown": kept.unknown})
        return
    table(("id", "kind", "batch", "what", "failures", "since", "tried again", "error"), map(_line, found))
    out.print(f"{total} in all")
    say((f"what lies there of kind {name} is unknown: {why}" for name, why in kept.unknown.items()), err)


def count(batch: str | None, kind: str | None) -> int:
    """Count the quarantine's rows, of all batches and kinds or of the given ones."""
    return Quarantined.oldest_first(batch=batch, kind=kind).count()


def after(number: int, batch: str | None, kind: str | None, limit: int) -> list[Found]:
    """Return the next *limit* rows of the quarantine after the row with that number."""
    return [_row(row) for row in Quarantined.after(number, batch=batch, kind=kind).limit(limit)]


def kept_by_documents(settings: Settings, batch: str | None, kind: str | None, limit: int) -> Kept:
    """Return entries that batches keep themselves, oldest first, at most *limit* of each kind.

    Raises `Problem` if the kind is unknown.
    """
    found, unknown, total = list[Found](), dict[str, str](), 0
    for name, refused in _kept(batch, kind):
        try:
            with looking(name):
                found += _entries(name, refused, settings, limit)
                total += refused.count()
        except (redis.RedisError, pw.ProgrammingError, Problem) as error:
            unknown[refused.kind] = sentence(error) or str(error)
    return Kept(found, total, unknown)


quarantine = group(
    "quarantine",
    "What failed by itself: it is left out until its next try, or until a person decides, and stops nothing else.",
    quarantine_list,
)


@quarantine.command("show")
def quarantine_show(number: Annotated[str, typer.Argument(metavar="ID")], json: Json = False) -> None:
    """Show all that is known of one of them."""
    with connected("quarantine") as settings:
        found = named(number, settings)
    if json:
        emit(found._asdict())
    else:
        table(("", ""), (found._asdict() | {"retry_at": found.retry_at or PERSON}).items())


@quarantine.command("retry")
def quarantine_retry(
    number: Id = None, everything: All = False, batch: Batch = None, kind: Kind = None, json: Json = False
) -> None:
    """Try one, or all, once more: by the next run, or by the next fan-out.  What fails again waits on as before."""
    retried = _act("retry", number, everything, batch, kind)
    answer({"retried": retried}, f"{retried} {WORDS['retry']}", json=json)


@quarantine.command("discard")
def quarantine_discard(
    number: Id = None, everything: All = False, batch: Batch = None, kind: Kind = None, json: Json = False
) -> None:
    """Forget one, or all: what is not due any more, or must stay as it is.

    A record or child that is due all the same is tried as if it had never failed; a ref, an upload or an object that
    was refused stays for good.
    """
    discarded = _act("discard", number, everything, batch, kind)
    answer({"discarded": discarded}, f"{discarded} {WORDS['discard']}", json=json)


def _act(act: Act, number: str | None, everything: bool, batch: str | None, kind: str | None) -> int:
    if (number is None) != everything:
        wrong_use("name one by its id, or say --all")
    with connected("quarantine") as settings:
        return decide(act, number, batch, kind, settings)


def decide(
    act: Act, number: str | None, batch: str | None, kind: str | None, settings: Settings, *, expect: int | None = None
) -> int:
    """Apply the act to one entry or to all of a batch or kind, record it, and count them.

    *expect* is the number that the person saw. If the number has changed, `Problem` is raised and nothing is done.
    `Problem` is also raised if an entry does not exist or cannot be changed. Needs a connection.
    """
    meant = Meant.of(act, number, batch, kind, settings)
    if expect not in {None, meant.total}:
        raise Problem(f"{meant.total:,} are there now, and not {expect:,}: nothing is done; look at them again")
    done = _on_rows(act, number, batch, meant.rows, settings) if meant.rows else 0
    done += sum(_on_kept(act, number, *one) for one in meant.kept)
    if number is not None and not done:
        there = _named(number, settings) is not None
        raise Problem(f"{number} stays as it is: {STAYS[act]}") if there else _nothing(number)
    return done


class Meant(NamedTuple):
    """Entries that an act changes: ids of rows, and keys that batches keep themselves.

    Entries that arrive later are left unchanged.
    """

    rows: list[int]
    kept: list[tuple[str, Refused, list[str]]]

    @classmethod
    def of(cls, act: Act, number: str | None, batch: str | None, kind: str | None, settings: Settings) -> Meant:
        """Find one entry by its id, or all of a batch or kind.

        Raises Redis' error if Redis is needed and does not answer.
        """
        if number is not None and number.isdecimal():
            return cls(_row_ids(act, Quarantined.select().where(Quarantined.id == int(number))), [])
        rows = _row_ids(act, Quarantined.oldest_first(batch=batch, kind=kind)) if number is None else []
        kind, _, key = (kind, "", None) if number is None else number.partition(":")
        kept = [(name, one, _kept_keys(act, name, one, settings)) for name, one in _kept(batch, kind)]
        chosen = [(name, one, keys if key is None else [key] * (key in keys)) for name, one, keys in kept]
        return cls(rows, [one for one in chosen if one[2]])

    @property
    def total(self) -> int:
        """Number of chosen entries."""
        return len(self.rows) + sum(len(keys) for *_, keys in self.kept)


class Decided(NamedTuple):
    """Number of changed entries, the *word* for it, and sentences about *refused* entries."""

    number: int
    word: str
    refused: list[str]

    def said(self) -> list[str]:
        """Return a sentence with the number of changed entries."""
        return [f"{self.number} {self.word}"]

    def not_done(self) -> list[str]:
        """Return the sentences about unchanged entries."""
        return self.refused


class Chosen(NamedTuple):
    """Choice of a person: these *ids*, or *everything* of a batch, of a kind or in all."""

    ids: Sequence[str]
    everything: bool
    batch: str | None
    kind: str | None

    def total(self, act: Act, settings: Settings) -> int:
        """Count the chosen entries.

        Raises `Problem` if nothing is chosen, and Redis' error if Redis is needed and does not answer.
        """
        if bool(self.ids) == self.everything:
            wrong_use("name one by its id, or say --all")
        return len(self.ids) or Meant.of(act, None, self.batch, self.kind, settings).total

    def look(self, settings: Settings) -> Iterator[str]:
        """Yield a sentence that describes each chosen entry."""
        for one in (named(number, settings) for number in self.ids):
            yield f"{one.id}: {one.record} {one.key} of {one.batch} failed {one.failures} times: {one.error}"

    def decide(self, act: Act, settings: Settings, *, expect: int | None) -> Decided:
        """Apply the act to the chosen entries and record it. Needs a connection.

        Refuses everything if the number of all entries is not *expect*.
        """
        if bool(self.ids) == self.everything:
            wrong_use("name one by its id, or say --all")
        done = decide(act, None, self.batch, self.kind, settings, expect=expect) if self.everything else 0
        refused = list[str]()
        for one in self.ids:
            try:
                done += decide(act, one, None, None, settings)
            except Problem as problem:
                refused.append(str(problem))
        return Decided(done, WORDS[act], refused)


def _row_ids(act: Act, chosen: pw.ModelSelect[Quarantined]) -> list[int]:
    """Return the ids of the chosen rows, except rows that the act cannot change."""
    chosen = chosen.where(Quarantined.reason.not_in(KINDS["message"])) if act == "retry" else chosen
    found: Any = chosen.select(Quarantined.id).tuples()
    return [number for (number,) in found]


def _kept_keys(act: Act, batch: str, refused: Refused, settings: Settings) -> list[str]:
    """Return the keys that a batch keeps itself, except keys that the act cannot change."""
    found = _entries(batch, refused, settings, MOST)
    return [one.key for one in found if act == "retry" or one.retry_at is None]


def _on_rows(act: Act, number: str | None, batch: str | None, ids: Sequence[int], settings: Settings) -> int:
    """Apply the act to the quarantine's rows and record it."""
    chosen = Quarantined.select().where(Quarantined.id == pw.fn.any(pw.Value(list(ids), unpack=False)))
    with database.atomic():
        # There may be 100,000 rows, so only the first are read, and the console's shorter statement timeout is raised.
        patience = round(settings.database_statement_timeout.total_seconds() * 1000)
        database.execute_sql("select set_config('statement_timeout', %s, true)", (str(patience),))
        first = list(chosen.order_by(Quarantined.since, Quarantined.id).limit(acts.LISTED))
        done: int = getattr(rows, act)(chosen.select(Quarantined.id)) if first else 0
        if done:
            of = batch if number is None else first[0].batch
            named = [f"{row.kind} {row.record} {row.key}: {row.error}" for row in first]
            acts.record(f"quarantine {act}", number or "all", batch=of, before={"count": done, "first": named})
    return done


def _on_kept(act: Act, number: str | None, batch: str, refused: Refused, keys: Sequence[str]) -> int:
    """Apply the act to entries that a batch keeps itself.

    The audit is written first: an act that cannot be recorded does not happen.
    """
    before = {"kind": refused.kind} | acts.some(keys)
    acts.record(f"quarantine {act}", number or "all", batch=batch, before=before)
    return (refused.retry if act == "retry" else refused.discard)(keys)


def _kept(batch: str | None, kind: str | None) -> Iterator[tuple[str, Refused]]:
    """Yield each batch with its own quarantines; raise `Problem` if the kind is unknown."""
    every = [(one.parent or one.name, refused) for one in all_declared() for refused in one.refused]
    known = [*KINDS, *(refused.kind for _, refused in every)]
    if kind is not None and kind not in known:
        wrong_use(f"there is no kind {kind!r}; there are: {', '.join(known)}")
    yield from ((name, one) for name, one in every if batch in (None, name) and kind in (None, one.kind))


def _entries(name: str, refused: Refused, settings: Settings, limit: int) -> Iterator[Found]:
    if refused.redis:
        require_redis()
    for one in refused.entries(settings, limit):
        yield Found(f"{refused.kind}:{one.key}", refused.kind, name, refused.record, *one)


def named(number: str, settings: Settings) -> Found:
    """Return the entry with that id; raise `Problem` if it does not exist."""
    if (found := _named(number, settings)) is None:
        raise _nothing(number)
    return found


def row_of(number: str) -> Quarantined | None:
    """Return the quarantine's row with that id, or None if a batch keeps the entry itself."""
    return Quarantined.get_or_none(Quarantined.id == int(number)) if number.isdecimal() else None


def _named(number: str, settings: Settings) -> Found | None:
    if number.isdecimal():
        return _row(row) if (row := row_of(number)) else None
    kept = _kept(None, number.partition(":")[0])
    every = (one for name, refused in kept for one in _entries(name, refused, settings, MOST))
    return next((one for one in every if one.id == number), None)


def _row(row: Quarantined) -> Found:
    return Found(str(row.id), row.kind, row.batch, row.record, row.key, row.error, row.failures, row.since, row.again)


def _line(one: Found) -> tuple[Any, ...]:
    what = f"{one.record} {one.key}" if one.id.isdecimal() else one.key
    return one.id, one.kind, one.batch, what, one.failures, one.since, one.retry_at or PERSON, one.error


def _nothing(number: str) -> Problem:
    return Problem(f"{number} does not lie in quarantine; `forgekeeper quarantine` lists what does")
