"""What `check` finds out about the forge's tables: whether they are what each batch expects (`contract`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.check_places import Finding, error, ok, warning
from forgekeeper.cli.grants import DELETING, Process, needs_of
from forgekeeper.database import Base, database, plans, signs
from forgekeeper.database.looking import WritesInLook, looking
from forgekeeper.database.relations import Column, Index, Relation, lacking, look
from forgekeeper.database.targets import Target
from forgekeeper.runs import following, preconditions
from forgekeeper.runs.preconditions import Below
from forgekeeper.settings import Settings

SUBJECT = "contract"
LOOKED_AT = 10_000
"""Rows of a relation that are looked at."""
LONGEST = 200
"""Characters of an index that a person reads; where a view computes a column, its terms may be many more."""
LOOK = "select {asked} from (select {columns} from {relation} limit {limit}) as looked_at"
TRIGGERS = """
    select t.tgname::text, p.oid::regproc::text, p.prosecdef, (t.tgtype & 8) <> 0, (t.tgtype & 16) <> 0
    from pg_trigger as t join pg_proc as p on p.oid = t.tgfoid
    where t.tgrelid = %s::oid and not t.tgisinternal and t.tgenabled <> 'D' and (t.tgtype & 24) <> 0
    order by t.tgname
"""
"""Of deletions and updates: bits 3 and 4."""
UNUSED_INDEXES = """
    select indexrelid::regclass::text, indrelid::regclass::text from pg_index join pg_class on pg_class.oid = indexrelid
    where indrelid = any(array(select %(table)s::oid union select relid from pg_partition_tree(%(table)s::oid)))
        and relkind = 'i' and not indisvalid
"""


def contract(settings: Settings, process: Process) -> Iterator[Finding]:
    """Look at the forge's tables batch by batch; what is the same for several is said once, and names them.

    Of a batch that has no schedule nothing is an error: the forge may lack what it works on.  A scheduler has no rights
    there, and of processes that only look nothing but their rights is said.
    """
    if process is Process.SCHEDULER:
        return
    said = defaultdict[Finding, list[str]](list)
    for batch in BATCHES.values():
        for finding in _looked_at(batch, process):
            off = settings.cron(batch.name) is None and finding.level == "error"
            said[finding._replace(level="warning") if off else finding].append(batch.name)
    for finding, names in said.items():
        yield finding._replace(message=f"{', '.join(names)}: {finding.message}")
    yield from (warning("forge", sentence) for sentence in signs.advice())
    yield from (error("forge", sentence) for sentence in signs.objections(settings.forge_schema))


def _looked_at(batch: BatchSpec, process: Process) -> list[Finding]:
    """Look at the batch's tables in a transaction that only reads."""
    try:
        with looking("a view or function that it reads"):
            return list(_of(batch, process))
    except WritesInLook as refused:
        return [error(SUBJECT, str(refused))]


def _of(batch: BatchSpec, process: Process) -> Iterator[Finding]:
    tables = look([one.sql for one in batch.relations])
    # The forge may lack what is optional.
    relations = [one for one in batch.relations if one.sql in tables]
    needed: dict[type[Base] | str, list[str]] = {
        one.model: needs_of(one.model, process, reads=one.reads) for one in relations
    }
    deletes = process in DELETING
    wrong = [*preconditions.unfit(batch, rights=False), *lacking(needed, tables)]
    if wrong := wrong or ([*preconditions.overlooked(batch)] if deletes else []):
        yield from (error(SUBJECT, sentence) for sentence in wrong)
        return
    if not deletes:
        yield ok(SUBJECT, f"a {process} has the rights that it needs")
        return
    below = preconditions.below([one.model for one in relations])
    errors = False
    for relation in relations:
        if "select" not in relation.operations():
            continue
        parts = [one for one in below if one.name == relation.sql]
        looks = _rows(relation, tables[relation.sql]), _walks(relation, parts), _triggers(relation, parts)
        for finding in chain(*looks, _find_unused_indexes(parts)):
            errors |= finding.level == "error"
            yield finding
    for forbids, sentence in following.described(batch, tables):
        yield (warning if forbids else ok)(SUBJECT, sentence)
    yield from (warning(SUBJECT, sentence) for sentence in batch.obstacles())
    if relations and not errors:
        yield ok(SUBJECT, f"as expected: {', '.join(_shown(relation, below) for relation in relations)}")


def _shown(relation: Relation, below: Sequence[Below]) -> str:
    """Name a relation, the tables that it shows if it is a view, and whether its rows go by ctid."""
    said = []
    if tables := [one.called for one in below if one.name == relation.sql and not one.itself and one.kind != "v"]:
        said.append(f"a view of {', '.join(tables)}")
    if "delete" in relation.operations() and Target.find(relation.model).by_ctid:
        said.append("rows go by ctid")
    return f"{relation.name} ({', '.join(said)})" if said else relation.name


def _rows(relation: Relation, columns: Mapping[str, Column]) -> Iterator[Finding]:
    """Look at some rows for NULL and for keys that come twice, where nothing proves that there are none."""
    where, key = relation.name, relation.key
    unproved = [one.name for one in relation.fields if not one.nullable and not columns[one.name].filled]
    has_null = "column {}.{} has NULL in some rows, and no statement expects that"
    asked = {has_null.format(where, name): f'bool_or("{name}" is null)' for name in unproved}
    if any(columns[name].filled is None for name in key.split(", ")):
        twice = f"several rows of {where} have one {key}: a statement that takes one takes all"
        asked[twice] = f"count(*) > count(distinct ({key}))"
    if asked:
        names = ", ".join(f'"{one.name}"' for one in relation.fields)
        statement = LOOK.format(asked=", ".join(asked.values()), columns=names, relation=relation.sql, limit=LOOKED_AT)
        for sentence, found in zip(asked, database.execute_sql(statement).fetchone(), strict=True):
            if found:
                yield error(SUBJECT, sentence)


def _walks(relation: Relation, parts: Sequence[Below]) -> Iterator[Finding]:
    """Ask for the plan of each walk; where nothing serves it, say what does."""
    for index in (Index(relation.key, None), *relation.indexes):
        if not plans.is_walked(relation, index):
            yield warning(
                SUBJECT, f"statements will be slow, as no index serves {relation.name} {_way(relation, index, parts)}"
            )


def _way(relation: Relation, index: Index, parts: Sequence[Below]) -> str:
    """Say in which order rows are wanted, and how an index on the tables below gives it."""
    order = f"in the order of {index.columns}{index.condition}"
    tables = [one for one in parts if one.kind in {"r", "p"}]
    wanted = index if any(one.itself for one in tables) else plans.below(relation, index)
    if len(tables) != 1 or wanted is None or len(f"{wanted.columns}{wanted.where}") > LONGEST:
        of = ", ".join(one.called for one in tables)
        return f"{order}: create one of what the view has in place of these, below it ({of})"
    (table,) = tables
    if table.kind == "r":
        return f"{order}: `{wanted.on(table.called)}`"
    only = wanted.on(f"only {table.called}").replace(" concurrently", " NAME")
    return (
        f"{order}: {table.called} is partitioned, so `{only}`, then on each partition"
        f" `{wanted.on('PARTITION')}` and `alter index NAME attach partition` with that one"
    )


def _find_unused_indexes(parts: Sequence[Below]) -> Iterator[Finding]:
    """Warn of indexes that are not valid: lookups do not use them, and each insert pays for them."""
    for part in parts:
        for index, table in database.execute_sql(UNUSED_INDEXES, {"table": part.oid}).fetchall():
            yield warning(
                SUBJECT,
                f"index {index} of {table} is not valid, and no lookup uses it: unless it is just being built,"
                f" `reindex index concurrently {index}`, or drop it",
            )


def _triggers(relation: Relation, parts: Sequence[Below]) -> Iterator[Finding]:
    """Name what else happens to rows that are deleted or updated: it may raise."""
    done = {operation.split()[0] for operation in relation.operations()}
    for part in parts:
        if part.kind not in {"r", "p"}:
            continue
        for name, function, definer, on_delete, on_update in database.execute_sql(TRIGGERS, (part.oid,)).fetchall():
            fires = {"delete": on_delete, "update": on_update}
            if acts := [act for act, on_it in fires.items() if on_it and act in done]:
                whose = "its owner's" if definer else "this role's"
                yield warning(
                    SUBJECT,
                    f"trigger {name} of {part.called} runs {function} on {' and '.join(acts)}, with {whose} rights and"
                    " search_path: what it refuses, no run can do",
                )
