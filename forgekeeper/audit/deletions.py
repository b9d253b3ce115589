"""Deletions in the audit: a row for each chunk, with the details of each record.

If a deletion is one statement, the same statement writes its row: both or neither.  Refs and objects have no
transaction, so an *intent* precedes their deletion and an *outcome* follows it.  The next attempt closes intents that a
crash left open.  A row per chunk costs a hundredth of a row per record, and no index entry (`docs/adr/0021`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from hashlib import md5
from itertools import islice
from json import dumps, loads
from typing import Any, Generic, NamedTuple, TypeVar

import peewee as pw
from playhouse.postgres_ext import ArrayField, DateTimeTZField

from forgekeeper.platform.database import Base, Document, database, default_sql
from forgekeeper.platform.database.arrays import format_array, split_into_parts
from forgekeeper.platform.database.common_tables import CommonTable
from forgekeeper.platform.database.sessions import Statement, execute_in_one_request, write_transaction

MAX_RECORDS_PER_ROW = 250
"""Maximum records in a row: their ids stay inside the row and are searched there."""
MAX_AUDIT_ROWS_PER_STATEMENT = 10
"""Maximum rows per statement: the text of the statement has all their records."""
MAX_INTENT_AGE = timedelta(days=7)
"""Maximum age of an intent that is looked for because its outcome is missing."""
# A value that all records share is stored once; the comparison costs less than writing the value a hundred times.
DETAIL_COLUMN = "case when gone.{key}[1] = all(gone.{key}) then to_jsonb(gone.{key}[1]) else to_jsonb(gone.{key}) end"
NAME_HASH = "('x' || left(md5({name}), 8))::bit(32)::integer"

OTHER_COLUMN_PREFIX = "column_"
"""Prefix of the name of a column that the model lacks; the value is JSON in a text."""

# Spelled out, because PostgreSQL uses no index for "is not distinct from".
FROM_OPEN_INTENTS = """
    from audit_deletions as intended
    where phase = 'intent' and batch = %(batch)s and record = %(record)s and scope {is_it} and at > %(since)s
      and not exists (
        select from audit_deletions as closing where closing.intent = intended.id and closing.at > %(since)s
      )
"""
SELECT_OPEN_INTENTS = f"select id, ids, cardinality(hashes), detail, run {FROM_OPEN_INTENTS} order by id limit 100"
SELECT_SCOPES_WITH_OPEN_INTENTS = f"select distinct scope {FROM_OPEN_INTENTS.format(is_it='= any(%(scopes)s)')}"
INSERT_ROWS = """
    insert into audit_deletions (batch, run, tick, child, record, phase, scope, intent, ids, hashes, detail)
    select %(batch)s::text, %(run)s::bigint, %(tick)s::timestamptz, %(child)s::text, %(record)s::text, %(phase)s::text,
        %(scope)s::text, part.intent, part.ids::bigint[], part.hashes::integer[], part.detail::jsonb
    from unnest(%(intents)s::bigint[], %(ids)s::text[], %(hashes)s::text[], %(details)s::text[])
        with ordinality as part (intent, ids, hashes, detail, place)
    order by part.place
    returning id
"""
Key = TypeVar("Key", bound=Hashable)
MOVED_STATE = "moved"
"""State of a record that has changed since and was recorded again."""
REPEATED_STATE = "repeated"
"""State of a record that a later attempt deleted and recorded, after an earlier attempt ran out of time for that."""
FindStates = Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
"""Returns the present state of each record by its details; None for a state that is unknown now."""
# Intents of any age: the attempt may have died long ago, with no look at its records since.
SELECT_IDS_AT_WORK = """
    select unnest(ids) from audit_deletions as intended
    where phase = 'intent' and record = %(record)s
      and not exists (select from audit_deletions as closing where closing.intent = intended.id)
"""


class AuditItem(NamedTuple):
    """An item that is about to be deleted.

    The audit finds it by its *id* and *name*, and stores its *detail*.
    """

    id: int | None
    name: str
    detail: Mapping[str, Any]


class Intent(NamedTuple):
    """An intent without an outcome: the attempt died or was interrupted during its deletion."""

    id: int
    ids: Sequence[int]
    size: int
    detail: Mapping[str, Any]
    run: int | None


class EarlierIntent(NamedTuple):
    """An open intent of an earlier attempt, with its records' details and present states."""

    intent: Intent
    name: str
    rows: Sequence[Mapping[str, Any]]
    states: Sequence[str]

    def records_with_states(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each record's details and its state."""
        return zip(self.rows, self.states, strict=True)

    def close_as(self, states: Sequence[str]) -> IntentOutcome:
        """Return the intent's outcome if its records are in these *states*."""
        intent, names = self.intent, [str(row[self.name]) for row in self.rows]
        return IntentOutcome(intent.id, intent.ids, names, {**intent.detail, "state": _merge_equal(list(states))})


class IntentOutcome(NamedTuple):
    """The outcome that closes an intent: the states of its records and the other *columns*."""

    intent: int | None
    ids: Sequence[int]
    names: Sequence[str]
    columns: Mapping[str, Any]


class _RowOfRecords(NamedTuple):
    """A row for up to `MAX_RECORDS_PER_ROW` records: *detail* has the values of all records, or their common value."""

    ids: Sequence[int]
    hashes: Sequence[int]
    detail: Mapping[str, Any]
    intent: int | None = None

    def pick_records(self, places: Sequence[int]) -> _RowOfRecords:
        """Return a row of the records at these *places*."""
        ids, hashes = ([column[place] for place in places] if column else [] for column in self[:2])
        detail = {
            name: _merge_equal([value[place] for place in places]) if isinstance(value, list) else value
            for name, value in self.detail.items()
        }
        return _RowOfRecords(ids, hashes, detail)


class Deletion(Base):
    """A chunk of records that are deleted or about to be deleted."""

    grants = "worker: select, insert"

    id = pw.BigIntegerField(constraints=[pw.SQL("generated by default as identity")])
    at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    batch = pw.TextField()
    record = pw.TextField()
    run = pw.BigIntegerField(null=True)
    tick = DateTimeTZField(null=True)
    child = pw.TextField(null=True)
    phase = pw.TextField()
    intent = pw.BigIntegerField(null=True)
    scope = pw.TextField(null=True)
    ids = ArrayField(pw.BigIntegerField, index=False)
    hashes = ArrayField(pw.IntegerField, index=False)
    detail = Document()

    class Meta:
        table_name = "audit_deletions"
        primary_key = pw.CompositeKey("id", "at")


class Audit:
    """The audit of one attempt at a *run*, or at a *child* that the run has sent.

    Writes nothing unless *on*.  *values* are the parameters of a statement with a `build_clause`.
    """

    def __init__(
        self, batch: str, *, on: bool, run: int | None = None, tick: datetime | None = None, child: str | None = None
    ) -> None:
        self.on = on
        self.child = child
        self._facts = {"batch": batch, "run": run, "tick": tick, "child": child}
        self.values = {f"audit_{name}": value for name, value in self._facts.items()} if on else {}

    def build_clause(
        self,
        record: str,
        source: str,
        *,
        id: str,  # noqa: A002
        name: str | None = None,
        part: str = "audited",
        **columns: str,
    ) -> list[CommonTable]:
        """Return the common table *part*: it records the rows of the table *source*.

        Empty if the audit is off.  *id*, *name* and *columns* are SQL expressions over *source*.  People look for a
        record by its id and its *name*.
        """
        if not self.on:
            return []
        hashes = f"array_agg({NAME_HASH.format(name=name)})" if name else "'{}'::integer[]"
        arrays = "".join(f", array_agg({value}) as of_{place}" for place, value in enumerate(columns.values()))
        detail = ", ".join(
            f"{_quote_name(called)}, {DETAIL_COLUMN.format(key=f'of_{n}')}" for n, called in enumerate(columns)
        )
        query = f"""
        insert into audit_deletions (batch, record, run, tick, child, phase, ids, hashes, detail)
        select %(audit_batch)s, '{record}', %(audit_run)s, %(audit_tick)s, %(audit_child)s, 'done', ids, hashes,
            jsonb_build_object({detail})
        from (select array_agg({id}) as ids, {hashes} as hashes{arrays} from {source}) as gone where ids is not null
        returning 1
    """
        return [CommonTable(part, query)]

    def record_deleted(self, record: str, *, ids: Sequence[int], **columns: Any) -> None:
        """Record the records that this transaction has deleted."""
        self.insert_rows("done", record, _split_into_rows(ids, (), columns))

    def record_outcomes(self, record: str, ended: Iterable[IntentOutcome]) -> None:
        """Record the outcomes of intents, in the transaction at hand."""
        rows = (part._replace(intent=one.intent) for one in ended for part in _split_into_rows(*one[1:]))
        self.insert_rows("outcome", record, rows)

    def find_open_intents(self, record: str, *, now: datetime, scope: str | None = None) -> list[Intent]:
        """Return up to a hundred intents of earlier attempts without an outcome, the oldest first.

        *now* is the database's time, of any moment of the run.
        Only the caller works on that *scope*; a suspended attempt that resumes may close its own intents a second time.
        """
        if not self.on:
            return []
        # The age is a constant, so PostgreSQL does not lock partitions of earlier months, not even to plan.
        values = {"batch": self._facts["batch"], "record": record, "scope": scope, "since": now - MAX_INTENT_AGE}
        statement = SELECT_OPEN_INTENTS.format(is_it="is null" if scope is None else "= %(scope)s")
        return [Intent(*row) for row in database.execute_sql(statement, values).fetchall()]

    def find_scopes_with_open_intents(self, record: str, scopes: Sequence[str], *, now: datetime) -> set[str]:
        """Return the *scopes* with intents that `find_open_intents` would return."""
        if not self.on:
            return set()
        values = {"batch": self._facts["batch"], "record": record, "scopes": scopes, "since": now - MAX_INTENT_AGE}
        return {scope for (scope,) in database.execute_sql(SELECT_SCOPES_WITH_OPEN_INTENTS, values).fetchall()}

    def insert_rows(
        self,
        phase: str,
        record: str,
        parts: Iterable[_RowOfRecords],
        *,
        scope: str | None = None,
        first: Sequence[Statement] = (),
    ) -> list[int]:
        """Insert a row for each part; return their ids, in the order of the parts.

        The statements *first* are executed before, in the request of the first rows.
        """
        numbers = list[int]()
        for rows in split_into_parts(parts if self.on else (), MAX_AUDIT_ROWS_PER_STATEMENT):
            found = execute_in_one_request([*first, self.write_insert(phase, record, rows, scope=scope)])
            numbers += [number for (number,) in found.fetchall()]
            first = ()
        return numbers

    def write_insert(
        self, phase: str, record: str, rows: Sequence[_RowOfRecords], *, scope: str | None = None
    ) -> Statement:
        """Return the statement that inserts the rows; written by hand, as peewee takes as long as PostgreSQL."""
        values = {
            **self._facts,
            "record": record,
            "phase": phase,
            "scope": scope,
            "intents": format_array(row.intent for row in rows),
            "ids": format_array(format_array(row.ids) for row in rows),
            "hashes": format_array(format_array(row.hashes) for row in rows),
            "details": format_array(_encode_detail(row.detail) for row in rows),
        }
        return Statement("audit", INSERT_ROWS, values)


def expand_records(ids: Sequence[int], detail: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield each record's id and details; columns without a field are in ``others``."""
    for place in range(count):
        facts = {key: value[place] if isinstance(value, list) else value for key, value in detail.items()}
        others = {
            key.removeprefix(OTHER_COLUMN_PREFIX): loads(facts.pop(key))
            for key in detail
            if key.startswith(OTHER_COLUMN_PREFIX)
        }
        yield {"id": ids[place] if place < len(ids) else None, **facts} | ({"others": others} if others else {})


def hash_name(name: str) -> int:
    """Return the first 32 bits of a name's MD5 as a PostgreSQL integer, to find the name by."""
    return int.from_bytes(md5(name.encode(), usedforsecurity=False).digest()[:4], signed=True)


def _quote_name(name: str) -> str:
    """Return a name as an SQL string literal in a statement with parameters."""
    return "'{}'".format(name.replace("'", "''").replace("%", "%%"))


def _encode_detail(detail: Mapping[str, Any]) -> str:
    return dumps(detail, default=datetime.isoformat, ensure_ascii=False)


def _split_into_rows(ids: Sequence[int], names: Sequence[str], columns: Mapping[str, Any]) -> Iterator[_RowOfRecords]:
    for start in range(0, max(1, len(ids), len(names)), MAX_RECORDS_PER_ROW):
        part = slice(start, start + MAX_RECORDS_PER_ROW)
        detail = {
            key: list(value[part]) if isinstance(value, (list, tuple)) else value for key, value in columns.items()
        }
        yield _RowOfRecords(list(ids[part]), [hash_name(name) for name in names[part]], detail)


class _OpenIntent(NamedTuple, Generic[Key]):
    """An intent of this attempt without an outcome: the *keys* of its records, and its *row* in the audit."""

    keys: Sequence[Key]
    row: _RowOfRecords

    def pick_records(self, places: Sequence[int]) -> _OpenIntent[Key]:
        """Return an intent of the records at these *places*."""
        if len(places) == len(self.keys):
            return self
        return _OpenIntent([self.keys[place] for place in places], self.row.pick_records(places))


class IntentLog(Generic[Key]):
    """Records of one kind that an attempt is about to delete, by keys of the caller.

    No other attempt works on the *scope*, so it identifies the intents of an attempt that died.
    """

    def __init__(self, audit: Audit, record: str, *, scope: str | None = None) -> None:
        self._audit = audit
        self._record = record
        self._scope = scope
        self._open_intents: dict[int, _OpenIntent[Key]] = {}

    def begin(self, items: Mapping[Key, AuditItem]) -> None:
        """Record the items before their deletion, in the transaction at hand or in a new transaction.

        An item that is recorded again has moved since the first time.
        """
        if self._audit.on and items:
            with nullcontext() if database.in_transaction() else write_transaction():
                begun = self._insert_intents(list(_make_intents(items)))
            self._open_intents |= begun

    def commit(self, items: Mapping[Key, AuditItem], *, after: Iterable[Statement] = ()) -> None:
        """Record the items before their deletion *after* some statements, in a transaction.

        A few items are recorded in one request.  Call it outside a transaction.
        """
        is_small = len(items) <= MAX_RECORDS_PER_ROW
        first = [*after] if is_small else []
        with nullcontext() if is_small else write_transaction():
            # One by one: thousands of values would be in memory at once.
            for one in () if is_small else after:
                execute_in_one_request([one])
            begun = self._insert_intents(list(_make_intents(items)), first=first) if self._audit.on and items else {}
            if first and not begun:
                execute_in_one_request(first)
        self._open_intents |= begun

    @contextmanager
    def recording_states(self, states: Mapping[Key, str]) -> Iterator[None]:
        """Run the block and record the *states* of begun records, in one transaction."""
        with write_transaction():
            yield
            closed, begun = self._close_intents(states) if self._audit.on else ([], {})
        for number in closed:
            del self._open_intents[number]
        self._open_intents |= begun

    def write_outcomes(self, states: Mapping[Key, str]) -> list[Statement] | None:
        """Return the statements that record the *states* of begun records, for a request with other statements.

        None if they are too many rows for a request.  Call `forget_intents` after the commit.
        """
        outcomes, left = self._find_outcomes(states) if self._audit.on else ({}, [])
        if left or len(outcomes) > MAX_AUDIT_ROWS_PER_STATEMENT:
            return None
        return [self._audit.write_insert("outcome", self._record, [*outcomes.values()])] if outcomes else []

    def forget_intents(self, states: Mapping[Key, str]) -> None:
        """Forget the intents of records whose *states* are committed."""
        for number in [number for number, intent in self._open_intents.items() if states.keys() & {*intent.keys}]:
            del self._open_intents[number]

    def open_keys(self) -> list[Key]:
        """Return the keys of the records without a recorded outcome."""
        return list(dict.fromkeys(key for intent in self._open_intents.values() for key in intent.keys))

    def _insert_intents(
        self, intents: Sequence[_OpenIntent[Key]], *, first: Sequence[Statement] = ()
    ) -> dict[int, _OpenIntent[Key]]:
        rows = [intent.row for intent in intents]
        numbers = self._audit.insert_rows("intent", self._record, rows, scope=self._scope, first=first)
        return dict(zip(numbers, intents, strict=True))

    def _close_intents(self, states: Mapping[Key, str]) -> tuple[list[int], dict[int, _OpenIntent[Key]]]:
        """Close intents with a known state; records without a known state get new intents."""
        outcomes, left = self._find_outcomes(states)
        self._audit.insert_rows("outcome", self._record, outcomes.values())
        return list(outcomes), self._insert_intents(left)

    def _find_outcomes(self, states: Mapping[Key, str]) -> tuple[dict[int, _RowOfRecords], list[_OpenIntent[Key]]]:
        """Return the outcomes of intents with a known state, and intents of their records without a known state."""
        outcomes, left = dict[int, _RowOfRecords](), list[_OpenIntent[Key]]()
        latest = {key: number for number, intent in self._open_intents.items() for key in intent.keys}
        for number, intent in self._open_intents.items():
            ended = [place for place, key in enumerate(intent.keys) if key in states]
            if not ended:
                continue
            keys, row = intent.pick_records(ended)
            become = _merge_equal([states[key] if latest[key] == number else MOVED_STATE for key in keys])
            outcomes[number] = row._replace(intent=number, detail={**row.detail, "state": become})
            still_open = [place for place, key in enumerate(intent.keys) if key not in states and latest[key] == number]
            left += [intent.pick_records(still_open)] if still_open else []
        return outcomes, left


def _make_intents(items: Mapping[Key, AuditItem]) -> Iterator[_OpenIntent[Key]]:
    """Yield an intent for each `MAX_RECORDS_PER_ROW` records."""
    for keys in split_into_parts(items, MAX_RECORDS_PER_ROW):
        said = [items[key] for key in keys]
        ids, names = [item.id for item in said if item.id is not None], [item.name for item in said]
        columns = {name: _merge_equal([item.detail[name] for item in said]) for name in said[0].detail}
        yield from (_OpenIntent(keys, row) for row in _split_into_rows(ids, names, columns))


def find_ids_at_work(record: str) -> set[int]:
    """Return the ids of the records that have an intent and no outcome."""
    return {number for (number,) in database.execute_sql(SELECT_IDS_AT_WORK, {"record": record}).fetchall()}


def find_earlier_intents(
    audit: Audit, record: str, find_states: FindStates, *, now: datetime, name: str, scope: str | None = None
) -> Iterator[list[EarlierIntent]]:
    """Yield the open intents of earlier attempts with their records' present states.

    *find_states* returns the states by the records' details.  The caller closes each list by `Audit.record_outcomes`
    before it asks for the next list.  An intent stays open while the state of any of its records is unknown.  *now* is
    the database's time, *name* the detail by which people look for a record.
    """
    while unclosed := audit.find_open_intents(record, now=now, scope=scope):
        rows = [list(expand_records(intent.ids, intent.detail, intent.size)) for intent in unclosed]
        states = iter(find_states([row for each in rows for row in each]))
        found = []
        for intent, each in zip(unclosed, rows, strict=True):
            become = [state for state in islice(states, len(each)) if state is not None]
            if len(become) == len(each):
                found.append(EarlierIntent(intent, name, each, become))
        if not found:
            return
        yield found


def _merge_equal(values: list[Any]) -> Any:
    """Return the common value if all values are equal, else the values."""
    return values[0] if values and values.count(values[0]) == len(values) else values
