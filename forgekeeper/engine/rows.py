"""The loops that delete rows and change them, chunk by chunk; and the preview, by the same condition."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import peewee as pw
import structlog

from forgekeeper.api.answers import WHOLE_NUMBER_FIELDS, Changes, Rows, default_record_name
from forgekeeper.api.batches import find_batch_name
from forgekeeper.api.inspection import PreviewContext, PreviewPart
from forgekeeper.engine.run import BadRecords, Run, TooManyBadRecords
from forgekeeper.engine.statement import (
    COUNT_DELETED_TUPLES,
    ChunkResult,
    RowChunk,
    RowStatements,
    write_bytes,
    write_condition,
)
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger.heartbeats import LostRun
from forgekeeper.ledger.limits import NO_AMOUNT, UNLIMITED, Amount
from forgekeeper.platform.database import database, exclusions, sqlstate, survey
from forgekeeper.platform.database.cascades import Cascades
from forgekeeper.platform.database.common_tables import CommonTable, append_tables
from forgekeeper.platform.database.naming import column_name, relation_name, shown_name
from forgekeeper.platform.database.queries import START_POSITION, WALK_IN_ORDER, Position, filter_keys, list_positions
from forgekeeper.platform.database.sessions import (
    LOCK_NOT_AVAILABLE,
    EngineTransaction,
    committed_transaction,
    execute_prepared,
    write_prefix,
    write_transaction,
)
from forgekeeper.platform.database.targets import TargetRelation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import write_insert

COUNTING_TIME_SHARE = 0.7
"""Share of a preview's time for counting the rows that would be deleted; the rest is for the rows that stay."""
KEPT_BY_TRIGGER_REASON = "a trigger may keep the rows, `forgekeeper check` names the triggers of the table"

log = structlog.get_logger(__name__)


def delete_due(run: Run[Any], rows: Rows[Any]) -> str | None:
    """Delete the rows; return why the run ended early, or None if all rows are deleted.

    Each chunk is one statement.  After a crash a row is either untouched, or deleted together with its followers, its
    objects' rows, its line in the audit and its use of limits.
    """
    sweep = RowDeletionPass(run, rows)
    of_all = rows.select_of_all_shares()
    rest = run.guard.giving_back_rest(LostRun, TooManyBadRecords)
    with run.bad_records(rows.record, of_all) as bad, rest:
        while limit := run.guard.count_allowed(rows.chunk):
            before = sweep.affected_rows
            if not sweep.delete_chunk(bad, limit):
                sweep.log_summary()
                sweep.check_undeleted_rows(bad)
                return None
            run.reach_failpoint("deleted")
            if run.deadline.has_passed(sweep.affected_rows - before):
                return "deadline"
            if rows.until is not None and (stopped := rows.until()) is not None:
                return stopped
    return "deadline"


class RowSize(NamedTuple):
    """A row by its *key*, with the bytes and records that its deletion counts against limits.

    *records* is 1 and the number of rows that follow it.
    """

    key: int
    bytes: int
    records: int


def insert_objects(rows: Rows[Any], settings: Settings) -> Rows[Any]:
    """Return the rows with the statement that inserts their objects into the outbox."""
    if rows.outbox is None:
        return rows
    assert rows.now is not None, "rows have to be bound to an instant"
    return replace(rows, also=[*rows.also, write_insert(rows.outbox, rows.project, rows.now, settings)])


class RowDeletionPass:
    """One pass over the rows, from the oldest on."""

    def __init__(self, run: Run[Any], rows: Rows[Any]) -> None:
        rows = insert_objects(rows, run.settings)
        self._run = run
        self._rows = rows
        self._statements = RowStatements(rows)
        # A row becomes due `due_delay` after its `since`.
        due = f"_since + interval '{rows.due_delay.total_seconds():.6f} s'" if rows.due_delay else "_since"
        columns = {"due": due} | {name: f"_audit_{place}" for place, name in enumerate(self._statements.audit)}
        name = None if rows.name is None else "_named"
        self._audit_tables = run.audit.build_clause(rows.record, "deleted", id="_key", name=name, **columns)
        for place in self._statements.cascades.follower_verbs:
            self._audit_tables += self._audit_followers(place)
        self._position = START_POSITION
        self._locked_totals = set[int]()
        self._is_chunk_full = False
        self.deleted = 0
        self.follower_count = 0
        self._claimed = 0

    @property
    def affected_rows(self) -> int:
        """Number of rows that were deleted, or changed because others were deleted."""
        return self.deleted + self.follower_count

    def delete_chunk(self, bad: BadRecords, limit: int) -> bool:
        """Delete the next chunk, except bad records; return False if rows or limits are used up.

        Raises `Blocked` if the relation reports deletions that it did not make; then nothing of the chunk is deleted.
        """
        while granted := self._reserve_limits(bad, limit):
            following = partial(self._find_next_positions, limit=granted, without=bad.keys)
            reached = bad.process_chunk(partial(self._delete_next, bad, granted), following)
            if self._needs_sizes:
                self._run.guard.give_back()
            if reached is not None:
                self._position = reached
                return True
            if not self._needs_sizes:
                return False
            # Others have deleted or locked the rows meanwhile, or added followers: reserve for the rows behind them.
        return False

    @property
    def _needs_sizes(self) -> bool:
        """Whether limits count more than one record for each row, or bytes."""
        guard = self._run.guard
        return guard.bytes_left is not None or (guard.is_limited and self._statements.has_followers)

    def log_summary(self) -> None:
        """Log facts that the result lacks: removed rows, and totals whose rows stay for now."""
        if not hasattr(self._run.outcome, self._rows.counted) and self.deleted:
            log.info("old records removed", record=self._rows.record, records=self.deleted)
        if self._rows.total is not None and self._locked_totals:
            table = shown_name(self._rows.total.kept.model)
            log.warning("totals locked", table=table, totals=len(self._locked_totals), first=min(self._locked_totals))

    def check_undeleted_rows(self, bad: BadRecords) -> None:
        """Find out whether PostgreSQL keeps claimed rows, as with a trigger of the table.

        A row that others changed meanwhile is not deleted either, but is deleted at the second try.  Raises `Blocked`
        if the run has deleted nothing, so that a batch that cannot delete is noticed; else logs a warning.
        """
        kept = self._claimed - self.deleted
        if not kept or self._locked_totals or not self._run.guard.count_allowed(1):
            return
        before = self._claimed, self.deleted
        self._position = START_POSITION
        self.delete_chunk(bad, 1)
        if self._claimed == before[0] or self.deleted > before[1]:
            return
        table = self._statements.target.display_name
        if not self.deleted:
            raise Blocked("schema", f"PostgreSQL does not delete due rows of {table}: {KEPT_BY_TRIGGER_REASON}")
        log.warning(
            "rows kept",
            record=self._rows.record,
            rows=kept,
            reason=f"PostgreSQL did not delete them: {KEPT_BY_TRIGGER_REASON}",
        )

    def _reserve_limits(self, bad: BadRecords, limit: int) -> int:
        """Reserve limits for the next chunk, or several chunks if many rows are due; return the chunk's rows."""
        guard = self._run.guard
        if not guard.is_limited:
            return limit
        if (self._is_chunk_full or guard.records_left) and not self._needs_sizes:
            return guard.reserve_chunk(limit)
        while rows := self._next_sizes(bad, limit):
            refused = {
                one.key: refusal for one in rows if (refusal := guard.find_refusal(Amount(one.records, one.bytes)))
            }
            if not refused:
                records, size, first = sum(one.records for one in rows), sum(one.bytes for one in rows), rows[0]
                granted = guard.reserve(records, size, least=first.bytes, least_records=first.records)
                # If no rows follow, each row is one record.
                return min(granted.records, len(rows))
            for key, refusal in refused.items():
                if not bad.set_aside(key, refusal.sentence):
                    guard.stop_reason = refusal.reason
                    return 0
        return 0

    def _next_sizes(self, bad: BadRecords, limit: int) -> list[RowSize]:
        """Return the rows that a chunk would claim now; writes of their condition are undone."""
        chunk = self._make_next_chunk(bad, limit)
        text, values = self._statements.write_size_query(chunk), self._statements.sql_values | chunk.sql_values
        with committed_transaction() as unit:
            unit.end = "rollback"
            found = database.execute_sql(unit.begin + WALK_IN_ORDER + text, values).fetchall()
        return [RowSize(*row) for row in found]

    def _make_next_chunk(self, bad: BadRecords, limit: int, only: Sequence[int] | None = None) -> RowChunk:
        """Return the next *limit* rows, of the keys *only* if it names any."""
        return RowChunk(
            limit=limit if only is None else min(len(only), limit),
            after=self._position,
            only=only,
            without=list(bad.keys),
            held_up=list(self._locked_totals),
            bytes_left=self._run.guard.bytes_left,
            rows_left=self._run.guard.records_left,
            # If a total was locked, more rows of it may be in the next chunk.
            totals_first=bool(self._locked_totals),
        )

    def _find_next_positions(self, *, limit: int, without: Collection[int]) -> list[Position]:
        """Return the positions of the rows that a chunk would claim, locked or not."""
        query, total = self._rows.select(), self._rows.total
        if total is not None and self._locked_totals:
            query = query.where(total.of.not_in(list(self._locked_totals)))
        return list_positions(query, self._rows.since, self._position, limit=limit, without=without)

    def _delete_next(self, bad: BadRecords, limit: int, only: Sequence[int] | None) -> Position | None:
        """Delete at most *limit* rows beyond our position; return the last row's position.

        *only* names the keys of the only rows to delete.  Rows that another transaction has locked are passed over, not
        waited for.  So is a row that was changed since the claim began: a later run sees its new values.
        """
        chunk = self._make_next_chunk(bad, limit, only)
        try:
            result = self._execute_and_commit(chunk)
        except pw.OperationalError as error:
            if self._rows.total is None or chunk.totals_first or sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            # If the lock was another than a total's, this statement fails, too.
            result = self._execute_and_commit(replace(chunk, totals_first=True))
        self._count_result(result)
        self._is_chunk_full = result is not None and result.records == self._rows.chunk
        return None if result is None else Position(result.instant, result.key)

    def _count_result(self, result: ChunkResult | None) -> None:
        """Count the rows of a committed statement, which has settled them."""
        deleted, followers = (Amount(*result[:2]), result.followers) if result else (NO_AMOUNT, None)
        followed = sum(count for _, count in followers or ())
        in_all = Amount(deleted.records + followed, deleted.bytes)
        self._run.guard.note_uncounted(followed)
        self._run.guard.note_settled(in_all, of_reserved=in_all.records)
        if result is None:
            return
        self._claimed += result.claimed
        self.deleted += deleted.records
        self.follower_count += followed
        self._locked_totals.update(result.held_up)
        self._run.add_to_result("cascaded", followed)
        self._run.add_to_result(self._rows.counted, deleted.records)
        self._run.add_to_result("batches", deleted.records > 0)
        if self._rows.counted_bytes is not None:
            self._run.add_to_result(self._rows.counted_bytes, deleted.bytes)

    def _execute_and_commit(self, chunk: RowChunk) -> ChunkResult | None:
        """Execute the statement, and commit if its answer is true."""
        statements = self._statements
        checks = statements.is_checked_by_keys or statements.has_followers
        with committed_transaction() if checks else nullcontext(EngineTransaction(write_prefix())) as unit:
            result = self._execute_delete(chunk, first=unit.begin + WALK_IN_ORDER)
            if checks and result is not None:
                self._check_result(result)
        return result

    def _check_result(self, result: ChunkResult) -> None:
        """Check the answer of a deletion.

        Raises `Blocked` if a view has several rows of one key, or if rows are left that a trigger or rule in place of
        PostgreSQL reports as deleted; `UncountedRows` if others added followers while followers were counted.
        """
        target, keys = self._statements.target, result.keys or ()
        if not target.has_places and len(keys) > len(set(keys)):
            raise _block_for_duplicate_keys(target)
        if target.instead_rules and (left := filter_keys(self._rows.model.select(), keys)):
            raise _block_for_left_rows(target, left)
        if self._statements.has_followers and self._count_deleted() > result.deleted_before + self._count_followers(
            result
        ):
            raise UncountedRows(_describe_uncounted_rows(self._statements.cascades))

    def _count_deleted(self) -> int:
        """Count the rows that this session has deleted by now from the tables of the rows and their followers."""
        deleted: int = database.execute_sql(f"select {COUNT_DELETED_TUPLES}", self._statements.sql_values).fetchone()[0]
        return deleted

    def _count_followers(self, result: ChunkResult) -> int:
        """Count the followers that foreign keys delete, by the statement's own count."""
        verbs = self._statements.cascades.follower_verbs
        return sum(count for place, count in result.followers or () if verbs.get(place) == "deleted")

    def _execute_delete(self, chunk: RowChunk, *, first: str) -> ChunkResult | None:
        """Execute the statement, prepared unless no later chunk has the same text."""
        guard, source = self._run.guard, "touched" if self._statements.has_followers else "deleted"
        settled = guard.build_settled_table(source, size="0" if self._rows.size is None else "_size")
        text = self._statements.write_delete(chunk, [*self._audit_tables, *settled])
        values = self._statements.sql_values | chunk.sql_values | guard.settlement_values() | self._run.audit.values
        if chunk.only is not None or chunk.limit != self._rows.chunk:
            row = database.execute_sql(first + text, values).fetchone()
        else:
            row = execute_prepared(f"delete_{self._rows.record}", text, values, prefix=first).fetchone()
        return None if row is None else ChunkResult(*row)

    def _audit_followers(self, place: int) -> list[CommonTable]:
        """Return the tables that record the rows of a model that followed others."""
        cascades = self._statements.cascades
        model, keys = cascades.models[place], cascades.key_columns(place)
        whole = isinstance(model._meta.primary_key, WHOLE_NUMBER_FIELDS)
        facts = {"deleted_with": "root"}
        facts |= {} if whole else {"key": f"array_to_string(row[1:{len(keys)}], ', ')"}
        id_ = cascades.value_sql(place, keys[0]) if whole else "null"
        names = {"id": f"({id_})::bigint", "part": f"audited_{place}"}
        record = self._rows.record if place == 0 else default_record_name(model)
        return self._run.audit.build_clause(record, f"carried_{place}", **names, **facts)


class UncountedRows(ValueError):
    """Others added followers while followers were counted; nothing was deleted."""


def _describe_uncounted_rows(cascades: Cascades) -> str:
    tables = ", ".join(map(shown_name, cascades.models[1:])) or "the same table"
    return f"rows of {tables} were inserted while dependent rows were counted: nothing was deleted"


def _block_for_left_rows(
    target: TargetRelation, left: Collection[int], *, done: str = "deleted", still: str = "there"
) -> Blocked:
    """Return the block of a batch whose relation reports rows as done that are still *left*."""
    sentence = (
        f"rows of {target.display_name} were reported as {done} and are still {still}, for example the key {min(left)}:"
        f" correct {' or '.join(target.instead_rules)}, which acts in place of PostgreSQL; nothing was {done}"
    )
    return Blocked("schema", sentence)


def _block_for_duplicate_keys(target: TargetRelation, *, done: str = "deleted") -> Blocked:
    """Return the block of a batch whose statement would take rows that it has not claimed."""
    (key,) = (field.column_name for field in target.model._meta.get_primary_keys())
    sentence = (
        f"several rows of {target.display_name} have the same {key}, so a statement on one row affects all of them:"
        f" make {key} unique; nothing was {done}"
    )
    return Blocked("schema", sentence)


def change_due(run: Run[Any], changes: Changes[Any]) -> str | None:
    """Change the rows; return why the run ended early, or None if all rows are changed."""
    position, target = START_POSITION, TargetRelation.find(changes.model, "update")
    with run.bad_records(changes.record, changes.select_of_all_shares()) as bad:
        while limit := run.guard.count_allowed(changes.chunk):
            found = list_positions(changes.select(), changes.since, position, limit=limit, without=bad.keys)
            if not found:
                return None
            found = found[: run.guard.reserve(len(found)).records]
            if not found:
                break
            position = found[-1]
            done = _change_page(run, changes, bad, target, [each.key for each in found])
            run.reach_failpoint("changed")
            if run.deadline.has_passed(done):
                break
    return "deadline"


def _change_page(
    run: Run[Any], changes: Changes[Any], bad: BadRecords, target: TargetRelation, keys: Sequence[int]
) -> int:
    """Change the rows of these keys, except bad records; return the number of changed rows."""
    before, failed = getattr(run.outcome, changes.counted), bad.failed
    try:
        with run.guard.giving_back_rest():
            bad.process_keys(partial(_change_and_count, run, changes, target), keys)
    finally:
        run.add_to_result("failed", bad.failed - failed)
    done: int = getattr(run.outcome, changes.counted) - before
    run.add_to_result("skipped", len(keys) - done - (bad.failed - failed))
    return done


def _change_and_count(run: Run[Any], changes: Changes[Any], target: TargetRelation, ids: Sequence[int]) -> None:
    """Change rows and audit them in one statement; then log and count each."""
    rows = execute_change(run, changes, target, ids)
    run.guard.note_settled(Amount(len(rows)), of_reserved=len(rows))
    run.add_to_result(changes.counted, len(rows))
    for row in rows:
        for field, count in changes.each(row).items():
            run.add_to_result(field, count)


def execute_change(
    run: Run[Any], changes: Changes[Any], target: TargetRelation, ids: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Change the rows of these keys that are still due; return a row for each.

    Raises `Blocked`, and changes nothing, if there are more rows than keys, or if rows are due that a trigger or rule
    in place of PostgreSQL reported as changed.
    """
    due, named = write_condition(changes.model, changes.due_condition)
    audited = run.audit.build_clause(changes.record, "changed", id="id", **changes.audit)
    settled = run.guard.build_settled_table("changed")
    recorded = append_tables([*_insert_notices(changes), *audited, *settled])
    values = {"ids": list(ids), "now": run.now} | named | run.guard.settlement_values() | run.audit.values
    values |= {"noticed_batch": run.declared.batch.name, "noticed_record": changes.record}
    text = write_prefix() + changes.statement.format(due=due, recorded=recorded)
    with write_transaction():
        rows: list[tuple[Any, ...]] = database.execute_sql(text, values).fetchall()
        if len(rows) > len(set(ids)):
            raise _block_for_duplicate_keys(target, done="changed")
        if target.instead_rules and len(left := filter_keys(changes.select(), ids)) > len(ids) - len(rows):
            raise _block_for_left_rows(target, left, done="changed", still="due")
    return rows


def _insert_notices(changes: Changes[Any]) -> Iterator[CommonTable]:
    """Yield the table that leaves a notice of each changed row, if the answer asks for it."""
    if changes.notice:
        detail = ", ".join(f"'{name}', {value}" for name, value in changes.notice.items())
        query = f"""
        insert into notices (batch, record, key, detail)
        select %(noticed_batch)s, %(noticed_record)s, id::text, jsonb_build_object({detail}) from changed
    """
        yield CommonTable("noticed", query)


def preview_rows(rows: Rows[Any], look: PreviewContext) -> Iterator[PreviewPart]:
    """Count the rows that a run would delete, and rows that follow them by foreign keys."""
    rows = rows.bind(find_batch_name(look.batch), look.now)
    yield _preview_due_rows(rows, look)
    if rows.cascades_to and rows.cascades.links:
        yield from _preview_followers(rows, look)


def _preview_due_rows(rows: Rows[Any], look: PreviewContext) -> PreviewPart:
    """Count the rows that a run would delete; rows of a locked total are busy, too."""
    columns = {"name": rows.name, "project": rows.project}
    named: dict[str, Any] = {name: column_name(found) for name, found in columns.items() if found is not None}
    if rows.size is not None:
        named["size"] = write_bytes(rows.size)
    if rows.total is not None:
        table, key = rows.total.table_sql, rows.total.key_sql
        named["busy"] = (
            f"{column_name(rows.total.of)} in (select {key} from {table} where {survey.locked_condition(table)})"
        )
    part = look.begin_part(rows.record, verb=rows.verb)
    counting = look.within_share(COUNTING_TIME_SHARE) if rows.stay_reasons else look
    counting.count_rows(part, replace(_survey_matching_rows(rows, rows.due_condition), **named), after=rows.due_delay)
    _count_kept_rows(rows, look, part)
    if rows.stay_reasons:
        look.count_kept(part, _survey_rows_to_keep(rows, look.now), rows.stay_reasons)
    return part


def _survey_rows_to_keep(rows: Rows[Any], now: datetime) -> survey.SurveyedRows:
    """Return the rows whose time has passed and that are not to be deleted."""
    since, key = column_name(rows.since), column_name(rows.model._meta.primary_key)
    where = (
        f"{since} < %(instant)s and ({exclusions.condition_sql(rows.model, rows.condition_of_all_shares)}) is not true"
    )
    return survey.SurveyedRows(relation_name(rows.model), where, {"instant": now - rows.due_delay}, due=since, key=key)


def _preview_followers(rows: Rows[Any], look: PreviewContext) -> Iterator[PreviewPart]:
    """Count, by their tables, the rows that foreign keys would delete or change with these."""
    found = survey.answer_within(look.until, lambda: (rows.count_with_followers(UNLIMITED), rows.select().count()))
    for place, verb in rows.cascades.follower_verbs.items():
        record = rows.record if place == 0 else default_record_name(rows.cascades.models[place])
        part = look.begin_part(record, verb=f"{verb} with others" if place == 0 else verb)
        if found is None:
            part.estimate = True
        else:
            counts, due = found
            part.records = counts.get(place, 0) - (due if place == 0 else 0)
        yield part


def _survey_matching_rows(rows: Rows[Any], due: pw.Node) -> survey.SurveyedRows:
    text, values = write_condition(rows.model, due)
    since, key = column_name(rows.since), column_name(rows.model._meta.primary_key)
    return survey.SurveyedRows(relation_name(rows.model), f"{text} and {since} is not null", values, due=since, key=key)


def _count_kept_rows(rows: Rows[Any], look: PreviewContext, part: PreviewPart) -> None:
    """Count excluded and kept rows that look due, each row for its first reason."""
    reasons, before = dict[str, str](), ""
    for reason, kept in rows.write_kept_conditions().items():
        if reason != exclusions.EXCLUDED_REASON or exclusions.has_exclusions(rows.batch):
            reasons[reason], before = kept + before, f"{before} and ({kept}) is not true"
    if reasons:
        look.count_kept(part, _survey_matching_rows(rows, rows.looks_due), reasons)
