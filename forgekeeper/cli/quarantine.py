"""`quarantine`: list, retry and discard records that failed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

import peewee as pw
import redis
import typer

from forgekeeper.api.batches import all_declared
from forgekeeper.api.inspection import RefusedRecords
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connect_command, describe_with_remedy, require_redis
from forgekeeper.cli.terminal import (
    All,
    Json,
    Problem,
    create_group,
    err,
    out,
    print_answer,
    print_json,
    print_sentences,
    print_table,
    wrong_use,
)
from forgekeeper.ledger import quarantine as rows
from forgekeeper.ledger.quarantine import REASONS_BY_KIND, Quarantined
from forgekeeper.platform.database import database
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.settings import Settings

BatchOption = Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="Only entries of this batch.")]
KindOption = Annotated[
    str | None,
    typer.Option("--kind", metavar="KIND", help="Only entries of this kind: record, child, message, upload, …"),
]
EntryId = Annotated[str | None, typer.Argument(metavar="[ID]", help="The entry's id, as `list` shows it.")]
QuarantineAct = Literal["retry", "discard"]
PERSON_DECIDES = "waits for a person"
ACT_RESULT_WORDS: dict[QuarantineAct, str] = {"retry": "will be retried", "discard": "discarded"}
UNCHANGED_REASONS: dict[QuarantineAct, str] = {
    "retry": "it cannot be read, or a run is working on it now",
    "discard": "it is retried automatically, and can be discarded once it waits for a person",
}
"""Reason why an act left an entry of the quarantine unchanged."""
MAX_READ_ENTRIES = 1_000_000
"""Maximum entries of a kind that an act reads."""


class QuarantineEntry(NamedTuple):
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


class BatchKeptEntries(NamedTuple):
    """Entries that batches keep themselves, their total, and the errors of unreadable kinds."""

    entries: list[QuarantineEntry]
    total: int
    unknown: dict[str, str]


def quarantine_list(
    batch: BatchOption = None,
    kind: KindOption = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of entries of each kind, oldest first.")
    ] = 100,
    json: Json = False,
) -> None:
    """List the quarantined entries, with their failures, errors and next retries."""
    with connect_command("quarantine") as settings:
        rows = [_entry_from_row(row) for row in Quarantined.oldest_first(batch=batch, kind=kind).limit(limit)]
        kept = list_kept_entries(settings, batch, kind, limit)
        found = list_facts(rows, kept, count_rows(batch, kind))
    if json:
        print_json(found)
        return
    columns = ("id", "kind", "batch", "record", "failures", "since", "next retry", "error")
    print_table(columns, map(_entry_cells, [*rows, *kept.entries]))
    out.print(f"{found['total']} in all")
    print_sentences((f"entries of kind {name} are not known: {why}" for name, why in kept.unknown.items()), err)


def list_facts(rows: Sequence[QuarantineEntry], kept: BatchKeptEntries, number: int) -> dict[str, Any]:
    """Return the JSON of `quarantine list`; *number* is the number of all our rows."""
    entries = [one._asdict() for one in (*rows, *kept.entries)]
    return {"total": number + kept.total, "entries": entries, "unknown": kept.unknown}


def count_rows(batch: str | None, kind: str | None) -> int:
    """Count the quarantine's rows, of all batches and kinds or of the given ones."""
    return Quarantined.oldest_first(batch=batch, kind=kind).count()


def list_rows_after(number: int, batch: str | None, kind: str | None, limit: int) -> list[QuarantineEntry]:
    """Return the next *limit* rows of the quarantine after the row with that number."""
    return [_entry_from_row(row) for row in Quarantined.select_after(number, batch=batch, kind=kind).limit(limit)]


def list_kept_entries(settings: Settings, batch: str | None, kind: str | None, limit: int) -> BatchKeptEntries:
    """Return entries that batches keep themselves, oldest first, at most *limit* of each kind.

    Raises `Problem` if the kind is unknown.
    """
    found, unknown, total = list[QuarantineEntry](), dict[str, str](), 0
    for name, refused in _list_kept_kinds(batch, kind):
        try:
            with read_only_snapshot(name):
                found += _read_entries(name, refused, settings, limit)
                total += refused.count()
        except (redis.RedisError, pw.ProgrammingError, Problem) as error:
            unknown[refused.kind] = describe_with_remedy(error) or str(error)
    return BatchKeptEntries(found, total, unknown)


quarantine = create_group(
    "quarantine",
    "List, retry and discard records that failed alone.  Each waits for its next retry, or for a person.",
    quarantine_list,
)


@quarantine.command("show")
def quarantine_show(number: Annotated[str, typer.Argument(metavar="ID")], json: Json = False) -> None:
    """Show all facts about an entry."""
    with connect_command("quarantine") as settings:
        found = require_entry(number, settings)
    if json:
        print_json(found._asdict())
    else:
        print_table(("", ""), (found._asdict() | {"retry_at": found.retry_at or PERSON_DECIDES}).items())


@quarantine.command("retry")
def quarantine_retry(
    number: EntryId = None,
    everything: All = False,
    batch: BatchOption = None,
    kind: KindOption = None,
    json: Json = False,
) -> None:
    """Retry an entry, or all, in the next run or fan-out.  An entry that fails again stays in quarantine."""
    retried = _connect_and_decide("retry", number, everything, batch, kind)
    print_answer({"retried": retried}, f"{retried} {ACT_RESULT_WORDS['retry']}", json=json)


@quarantine.command("discard")
def quarantine_discard(
    number: EntryId = None,
    everything: All = False,
    batch: BatchOption = None,
    kind: KindOption = None,
    json: Json = False,
) -> None:
    """Remove an entry, or all, from quarantine, because it is not due any more or must be kept.

    A record or child that is still due is tried as if it had never failed; a refused ref, upload or object is kept for
    ever.
    """
    discarded = _connect_and_decide("discard", number, everything, batch, kind)
    print_answer({"discarded": discarded}, f"{discarded} {ACT_RESULT_WORDS['discard']}", json=json)


def _connect_and_decide(
    act: QuarantineAct, number: str | None, everything: bool, batch: str | None, kind: str | None
) -> int:
    if (number is None) != everything:
        wrong_use("name an entry by its id, or use --all")
    with connect_command("quarantine") as settings:
        return decide_entries(act, number, batch, kind, settings)


def decide_entries(
    act: QuarantineAct,
    number: str | None,
    batch: str | None,
    kind: str | None,
    settings: Settings,
    *,
    expect: int | None = None,
) -> int:
    """Apply the act to one entry or to all of a batch or kind, record it, and count them.

    *expect* is the number that the person saw. If the number has changed, `Problem` is raised and nothing is done.
    `Problem` is also raised if an entry does not exist or cannot be changed. Needs a connection.
    """
    meant = MatchedEntries.match(act, number, batch, kind, settings)
    if expect not in {None, meant.total}:
        raise Problem(f"there are {meant.total:,} entries now, not {expect:,}: nothing was changed; check them again")
    done = _decide_rows(act, number, batch, meant.rows, settings) if meant.rows else 0
    done += sum(_decide_kept(act, number, *one) for one in meant.kept)
    if number is not None and not done:
        there = _find_entry(number, settings) is not None
        raise Problem(f"{number} is unchanged: {UNCHANGED_REASONS[act]}") if there else _unknown_entry_problem(number)
    return done


class MatchedEntries(NamedTuple):
    """Entries that an act changes: ids of rows, and keys that batches keep themselves.

    Entries that arrive later are left unchanged.
    """

    rows: list[int]
    kept: list[tuple[str, RefusedRecords, list[str]]]

    @classmethod
    def match(
        cls, act: QuarantineAct, number: str | None, batch: str | None, kind: str | None, settings: Settings
    ) -> MatchedEntries:
        """Find one entry by its id, or all of a batch or kind.

        Raises Redis' error if Redis is needed and does not answer.
        """
        if number is not None and number.isdecimal():
            return cls(_row_ids(act, Quarantined.select().where(Quarantined.id == int(number))), [])
        rows = _row_ids(act, Quarantined.oldest_first(batch=batch, kind=kind)) if number is None else []
        kind, _, key = (kind, "", None) if number is None else number.partition(":")
        kept = [(name, one, _kept_keys(act, name, one, settings)) for name, one in _list_kept_kinds(batch, kind)]
        chosen = [(name, one, keys if key is None else [key] * (key in keys)) for name, one, keys in kept]
        return cls(rows, [one for one in chosen if one[2]])

    @property
    def total(self) -> int:
        """Number of chosen entries."""
        return len(self.rows) + sum(len(keys) for *_, keys in self.kept)


class DecisionResult(NamedTuple):
    """Number of changed entries, the *word* for it, and sentences about *refused* entries."""

    number: int
    word: str
    refused: list[str]

    def describe_changes(self) -> list[str]:
        """Return a sentence with the number of changed entries."""
        return [f"{self.number} {self.word}"]

    def describe_refusals(self) -> list[str]:
        """Return the sentences about unchanged entries."""
        return self.refused


class EntryChoice(NamedTuple):
    """Choice of a person: these *ids*, or *everything* of a batch, of a kind or in all."""

    ids: Sequence[str]
    everything: bool
    batch: str | None
    kind: str | None

    def count_entries(self, act: QuarantineAct, settings: Settings) -> int:
        """Count the chosen entries.

        Raises `Problem` if nothing is chosen, and Redis' error if Redis is needed and does not answer.
        """
        if bool(self.ids) == self.everything:
            wrong_use("name an entry by its id, or use --all")
        return len(self.ids) or MatchedEntries.match(act, None, self.batch, self.kind, settings).total

    def describe_entries(self, settings: Settings) -> Iterator[str]:
        """Yield a sentence that describes each chosen entry."""
        for one in (require_entry(number, settings) for number in self.ids):
            yield f"{one.id}: {one.record} {one.key} of {one.batch} failed {one.failures} times: {one.error}"

    def decide(self, act: QuarantineAct, settings: Settings, *, expect: int | None) -> DecisionResult:
        """Apply the act to the chosen entries and record it. Needs a connection.

        Refuses everything if the number of all entries is not *expect*.
        """
        if bool(self.ids) == self.everything:
            wrong_use("name an entry by its id, or use --all")
        done = decide_entries(act, None, self.batch, self.kind, settings, expect=expect) if self.everything else 0
        refused = list[str]()
        for one in self.ids:
            try:
                done += decide_entries(act, one, None, None, settings)
            except Problem as problem:
                refused.append(str(problem))
        return DecisionResult(done, ACT_RESULT_WORDS[act], refused)


def _row_ids(act: QuarantineAct, chosen: pw.ModelSelect[Quarantined]) -> list[int]:
    """Return the ids of the chosen rows, except rows that the act cannot change."""
    chosen = chosen.where(Quarantined.reason.not_in(REASONS_BY_KIND["message"])) if act == "retry" else chosen
    found: Any = chosen.select(Quarantined.id).tuples()
    return [number for (number,) in found]


def _kept_keys(act: QuarantineAct, batch: str, refused: RefusedRecords, settings: Settings) -> list[str]:
    """Return the keys that a batch keeps itself, except keys that the act cannot change."""
    found = _read_entries(batch, refused, settings, MAX_READ_ENTRIES)
    return [one.key for one in found if act == "retry" or one.retry_at is None]


def _decide_rows(
    act: QuarantineAct, number: str | None, batch: str | None, ids: Sequence[int], settings: Settings
) -> int:
    """Apply the act to the quarantine's rows and record it."""
    chosen = Quarantined.select().where(Quarantined.id == pw.fn.any(pw.Value(list(ids), unpack=False)))
    with database.atomic():
        # There may be 100,000 rows, so only the first are read, and the console's shorter statement timeout is raised.
        patience = round(settings.database_statement_timeout.total_seconds() * 1000)
        database.execute_sql("select set_config('statement_timeout', %s, true)", (str(patience),))
        first = list(chosen.order_by(Quarantined.since, Quarantined.id).limit(acts.MAX_LISTED_THINGS))
        done: int = getattr(rows, act)(chosen.select(Quarantined.id)) if first else 0
        if done:
            of = batch if number is None else first[0].batch
            named = [f"{row.kind} {row.record} {row.key}: {row.error}" for row in first]
            acts.record_act(f"quarantine {act}", number or "all", batch=of, before={"count": done, "first": named})
    return done


def _decide_kept(
    act: QuarantineAct, number: str | None, batch: str, refused: RefusedRecords, keys: Sequence[str]
) -> int:
    """Apply the act to entries that a batch keeps itself.

    The audit is written first: an act that cannot be recorded does not happen.
    """
    before = {"kind": refused.kind} | acts.summarize_things(keys)
    acts.record_act(f"quarantine {act}", number or "all", batch=batch, before=before)
    return (refused.retry if act == "retry" else refused.discard)(keys)


def _list_kept_kinds(batch: str | None, kind: str | None) -> Iterator[tuple[str, RefusedRecords]]:
    """Yield each batch with its own quarantines; raise `Problem` if the kind is unknown."""
    every = [(one.parent_name or one.name, refused) for one in all_declared() for refused in one.refused]
    known = [*REASONS_BY_KIND, *(refused.kind for _, refused in every)]
    if kind is not None and kind not in known:
        wrong_use(f"there is no kind {kind!r}; there are: {', '.join(known)}")
    yield from ((name, one) for name, one in every if batch in (None, name) and kind in (None, one.kind))


def _read_entries(name: str, refused: RefusedRecords, settings: Settings, limit: int) -> Iterator[QuarantineEntry]:
    if refused.redis:
        require_redis()
    for one in refused.entries(settings, limit):
        yield QuarantineEntry(f"{refused.kind}:{one.key}", refused.kind, name, refused.record, *one)


def require_entry(number: str, settings: Settings) -> QuarantineEntry:
    """Return the entry with that id; raise `Problem` if it does not exist."""
    if (found := _find_entry(number, settings)) is None:
        raise _unknown_entry_problem(number)
    return found


def find_row(number: str) -> Quarantined | None:
    """Return the quarantine's row with that id, or None if a batch keeps the entry itself."""
    return Quarantined.get_or_none(Quarantined.id == int(number)) if number.isdecimal() else None


def _find_entry(number: str, settings: Settings) -> QuarantineEntry | None:
    if number.isdecimal():
        return _entry_from_row(row) if (row := find_row(number)) else None
    kept = _list_kept_kinds(None, number.partition(":")[0])
    every = (one for name, refused in kept for one in _read_entries(name, refused, settings, MAX_READ_ENTRIES))
    return next((one for one in every if one.id == number), None)


def _entry_from_row(row: Quarantined) -> QuarantineEntry:
    return QuarantineEntry(
        str(row.id), row.kind, row.batch, row.record, row.key, row.error, row.failures, row.since, row.next_retry_at
    )


def _entry_cells(one: QuarantineEntry) -> tuple[Any, ...]:
    what = f"{one.record} {one.key}" if one.id.isdecimal() else one.key
    return one.id, one.kind, one.batch, what, one.failures, one.since, one.retry_at or PERSON_DECIDES, one.error


def _unknown_entry_problem(number: str) -> Problem:
    return Problem(f"{number} is not in quarantine; `forgekeeper quarantine` lists the entries")
