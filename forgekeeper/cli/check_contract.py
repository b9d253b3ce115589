"""Findings of `check` on the forge's tables: whether they fit the batches (`contract`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import md5
from itertools import chain

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.cli.check_places import Finding, error, ok, warning
from forgekeeper.cli.grants import DELETING_PROCESSES, ProcessRole, list_privileges
from forgekeeper.guards import foreign_key_effects, preconditions
from forgekeeper.guards.preconditions import UnderlyingRelation
from forgekeeper.platform.database import Base, database, plans, signs
from forgekeeper.platform.database.read_only import ReadOnlyViolation, read_only_snapshot
from forgekeeper.platform.database.relations import Column, Index, Relation, find_missing_privileges, read_columns
from forgekeeper.platform.database.targets import TargetRelation
from forgekeeper.platform.settings import Settings

CONTRACT_SUBJECT = "contract"
MAX_EXAMINED_ROWS = 10_000
"""Rows of a relation that are examined."""
MAX_INDEX_CHARACTERS = 200
"""Maximum characters of an index in a message; indexes on computed columns may be longer."""
EXAMINE_FIRST_ROWS = "select {asked} from (select {columns} from {relation} limit {limit}) as looked_at"
SELECT_TRIGGERS = """
    select t.tgname::text, p.oid::regproc::text, p.prosecdef, (t.tgtype & 8) <> 0, (t.tgtype & 16) <> 0
    from pg_trigger as t join pg_proc as p on p.oid = t.tgfoid
    where t.tgrelid = %s::oid and not t.tgisinternal and t.tgenabled <> 'D' and (t.tgtype & 24) <> 0
    order by t.tgname
"""
"""Triggers on deletions (bit 3) and updates (bit 4)."""
TRIGGER_ACTS = ("delete", "update")
SELECT_PARTITIONS = """
    select quote_ident(nspname), quote_ident(relname) from pg_partition_tree(%(table)s::oid)
        join pg_class as c on c.oid = relid join pg_namespace as n on n.oid = relnamespace
    where isleaf order by relname
"""
MAX_SHOWN_PARTITIONS = 20
SELECT_ESTIMATED_ROWS = """
    select sum(reltuples)::bigint from pg_class
    where oid = any(array(select %(table)s::oid union select relid from pg_partition_tree(%(table)s::oid)))
        and relkind = 'r' and reltuples >= 0
"""
SELECT_INVALID_INDEXES = """
    select indexrelid::regclass::text, indrelid::regclass::text from pg_index join pg_class on pg_class.oid = indexrelid
    where indrelid = any(array(select %(table)s::oid union select relid from pg_partition_tree(%(table)s::oid)))
        and relkind = 'i' and not indisvalid
"""


def check_forge_tables(settings: Settings, process: ProcessRole) -> Iterator[Finding]:
    """Check the forge's tables batch by batch; equal findings are merged.

    Errors of a batch without schedule are warnings: the forge may lack its tables. A scheduler has no rights on the
    forge's tables, so nothing is checked. For processes that only read, only rights are checked.
    """
    if process is ProcessRole.SCHEDULER:
        return
    said = defaultdict[Finding, list[str]](list)
    adopted = signs.is_adopted(settings.forge_schema)
    for batch in BATCHES.values():
        for finding in _check_batch_read_only(batch, process, adopted=adopted):
            off = settings.schedule_of(batch.name) is None and finding.level == "error"
            said[finding._replace(level="warning") if off else finding].append(batch.name)
    for finding, names in said.items():
        yield finding._replace(message=f"{', '.join(names)}: {finding.message}")
    # Nobody can check whether the operators of an adopted forge have followed the advice.
    yield from ((ok if adopted else warning)("forge", sentence) for sentence in signs.list_advice())
    yield from (error("forge", sentence) for sentence in signs.find_objections(settings.forge_schema))
    if process in DELETING_PROCESSES:
        yield from (warning("forge", sentence) for sentence in signs.find_hints(settings.forge_schema))


def _check_batch_read_only(batch: BatchSpec, process: ProcessRole, *, adopted: bool) -> list[Finding]:
    """Check the batch's tables in a read-only transaction."""
    try:
        with read_only_snapshot("a view or function that it reads"):
            return list(_check_batch(batch, process, adopted=adopted))
    except ReadOnlyViolation as refused:
        return [error(CONTRACT_SUBJECT, str(refused))]


def _check_batch(batch: BatchSpec, process: ProcessRole, *, adopted: bool) -> Iterator[Finding]:
    tables = read_columns([one.sql for one in batch.relations])
    # Optional relations may be missing.
    relations = [one for one in batch.relations if one.sql in tables]
    needed: dict[type[Base] | str, list[str]] = {
        one.model: list_privileges(one.model, process, reads=one.reads) for one in relations
    }
    deletes = process in DELETING_PROCESSES
    wrong = [*preconditions.find_relation_faults(batch, rights=False), *find_missing_privileges(needed, tables)]
    if wrong := wrong or ([*preconditions.find_overlooked_rows(batch)] if deletes else []):
        yield from (error(CONTRACT_SUBJECT, sentence) for sentence in wrong)
        return
    if not deletes:
        yield ok(CONTRACT_SUBJECT, f"a {process} has the rights that it needs")
        return
    below = preconditions.list_underlying([one.model for one in relations])
    errors = False
    for relation in relations:
        if "select" not in relation.list_operations():
            continue
        parts = [one for one in below if one.name == relation.sql]
        looks = [_check_rows(relation, tables[relation.sql]), _find_unused_indexes(parts)]
        # The author of the adopted views knows the indexes and triggers below them.
        if not adopted:
            looks += [_check_walks(relation, parts), _check_triggers(relation, parts)]
        for finding in chain(*looks):
            errors |= finding.level == "error"
            yield finding
    for forbids, sentence in foreign_key_effects.describe_foreign_keys(batch, tables):
        yield (warning if forbids else ok)(CONTRACT_SUBJECT, sentence)
    yield from (warning(CONTRACT_SUBJECT, sentence) for sentence in batch.list_obstacles())
    if relations and not errors:
        yield ok(
            CONTRACT_SUBJECT, f"as expected: {', '.join(_describe_relation(relation, below) for relation in relations)}"
        )


def _describe_relation(relation: Relation, below: Sequence[UnderlyingRelation]) -> str:
    """Return a relation's name with its underlying tables, their rows, and the use of ctid."""
    parts = [one for one in below if one.name == relation.sql and one.kind != "v"]
    tables = [", ".join([*([] if one.is_itself else [one.called]), *_estimate_rows(one.oid)]) for one in parts]
    said = [f"{'' if parts[0].is_itself else 'a view of '}{', '.join(tables)}"] if any(tables) else []
    if "delete" in relation.list_operations() and TargetRelation.find(relation.model).is_found_by_ctid:
        said.append("rows are deleted by ctid")
    return f"{relation.name} ({', '.join(said)})" if said else relation.name


def _estimate_rows(table: int) -> Iterator[str]:
    """Yield PostgreSQL's estimate of the rows of a table with its partitions, if known."""
    (rows,) = database.execute_sql(SELECT_ESTIMATED_ROWS, {"table": table}).fetchone()
    if rows is not None:
        yield f"about {rows:,} rows"


def _check_rows(relation: Relation, columns: Mapping[str, Column]) -> Iterator[Finding]:
    """Examine rows for NULLs and duplicate keys, unless constraints rule them out."""
    where, key = relation.name, relation.key
    unproved = [one.name for one in relation.fields if not one.nullable and not columns[one.name].is_not_null]
    has_null = "column {}.{} has NULL in some rows, and no statement expects that"
    asked = {has_null.format(where, name): f'bool_or("{name}" is null)' for name in unproved}
    if any(columns[name].is_not_null is None for name in key.split(", ")):
        twice = f"several rows of {where} have the same {key}: a statement for one of them affects all"
        asked[twice] = f"count(*) > count(distinct ({key}))"
    if asked:
        names = ", ".join(f'"{one.name}"' for one in relation.fields)
        statement = EXAMINE_FIRST_ROWS.format(
            asked=", ".join(asked.values()), columns=names, relation=relation.sql, limit=MAX_EXAMINED_ROWS
        )
        for sentence, found in zip(asked, database.execute_sql(statement).fetchone(), strict=True):
            if found:
                yield error(CONTRACT_SUBJECT, sentence)


def _check_walks(relation: Relation, parts: Sequence[UnderlyingRelation]) -> Iterator[Finding]:
    """Check the plan of each walk; suggest an index if none serves the walk."""
    for index in (Index(relation.key, None), *relation.indexes):
        if not plans.is_index_walked(relation, index):
            yield warning(
                CONTRACT_SUBJECT,
                f"statements will be slow, as no index serves {relation.name} {_suggest_index(relation, index, parts)}",
            )


def _suggest_index(relation: Relation, index: Index, parts: Sequence[UnderlyingRelation]) -> str:
    """Return the wanted order of rows, and an index on the tables below that provides it."""
    order = f"in the order of {index.columns}{index.where_clause}"
    tables = [one for one in parts if one.kind in {"r", "p"}]
    wanted = index if any(one.is_itself for one in tables) else plans.find_index_below(relation, index)
    if len(tables) != 1 or wanted is None or len(f"{wanted.columns}{wanted.where}") > MAX_INDEX_CHARACTERS:
        of = ", ".join(one.called for one in tables)
        return f"{order}: create an index on the view's expressions for these columns, on the tables below it ({of})"
    (table,) = tables
    if table.kind == "r":
        return f"{order}: `{wanted.create_statement(table.called)}`"
    return f"{order}, run these statements: {'; '.join(_write_partitioned(table, wanted))}"


def _write_partitioned(table: UnderlyingRelation, index: Index) -> Iterator[str]:
    """Yield statements that create the index on a partitioned table without blocking writes."""
    name = f"forgekeeper_{md5(f'{table.called} {index}'.encode(), usedforsecurity=False).hexdigest()[:8]}"
    yield f"`create index {name} on only {table.called} ({index.columns}){index.where_clause}`"
    within = "".join(table.called.rpartition(".")[:2])
    parts = database.execute_sql(SELECT_PARTITIONS, {"table": table.oid}).fetchall()
    for number, (schema, part) in enumerate(parts[:MAX_SHOWN_PARTITIONS]):
        own = f"{name}_{number}"
        yield f"`{index.create_statement(f'{schema}.{part}').replace(' on ', f' {own} on ', 1)}`"
        yield f"`alter index {within}{name} attach partition {schema}.{own}`"
    if (more := len(parts) - MAX_SHOWN_PARTITIONS) > 0:
        yield f"and the same for {more} more partitions"


def _find_unused_indexes(parts: Sequence[UnderlyingRelation]) -> Iterator[Finding]:
    """Warn of invalid indexes: lookups do not use them, and each insert pays for them."""
    for part in parts:
        for index, table in database.execute_sql(SELECT_INVALID_INDEXES, {"table": part.oid}).fetchall():
            yield warning(
                CONTRACT_SUBJECT,
                f"index {index} of {table} is not valid, and no lookup uses it: unless it is still being built,"
                f" run `reindex index concurrently {index}`, or drop it",
            )


def _check_triggers(relation: Relation, parts: Sequence[UnderlyingRelation]) -> Iterator[Finding]:
    """Warn of triggers on deletion or update: their functions may raise."""
    done = {operation.split()[0] for operation in relation.list_operations()}
    fire = {part.oid: database.execute_sql(SELECT_TRIGGERS, (part.oid,)).fetchall() for part in parts}
    # A trigger function of the view changes the table with its own rights.
    of_view = [fires for part in parts if part.is_itself and part.kind == "v" for fires in fire[part.oid]]
    by_owner = {
        act for _, _, definer, *on in of_view if definer for act, on_it in zip(TRIGGER_ACTS, on, strict=True) if on_it
    }
    for part in (one for one in parts if one.kind in {"r", "p"}):
        for name, function, definer, *on in fire[part.oid]:
            if acts := [act for act, on_it in zip(TRIGGER_ACTS, on, strict=True) if on_it and act in done]:
                whose = "its owner's" if definer else "the view owner's" if by_owner.issuperset(acts) else "this role's"
                yield warning(
                    CONTRACT_SUBJECT,
                    f"trigger {name} of {part.called} runs {function} on {' and '.join(acts)}, with {whose} rights and"
                    " search_path: a run cannot change rows that it refuses",
                )
