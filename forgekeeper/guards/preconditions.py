"""Preconditions of every deletion; if one of them fails, the batch is blocked.

Some batches decide by PostgreSQL's clock which records are due, others by Redis's clock.  A clock that is a day ahead
deletes records that should stay.  A clock's answer counts for the middle of the request.  Half of the request's time is
the doubt, which never counts against the clock.

The forge owns its tables.  A view or a partitioned table is fine.  A single partition, also behind a view, hides the
other partitions: an object that one of their rows names would look as if no row named it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, combinations
from typing import Literal, NamedTuple, get_args

import redis

from forgekeeper.api.batches import BatchSpec
from forgekeeper.guards import foreign_key_effects
from forgekeeper.guards.register_epoch import REDIS_REPLACED_REASON, why_register_is_lost
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import Base, database, exclusions, now, relations, schema, signs
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.platform.database.integrity import reasons_to_miss_rows
from forgekeeper.platform.database.naming import name_parts, relation_name, shown_name
from forgekeeper.platform.database.sessions import execute_prepared
from forgekeeper.platform.database.view_changes import find_changed_views, find_refused_changes
from forgekeeper.platform.installation import (
    Installation,
    InstallationMismatch,
    find_redis_owner,
    mismatch_message,
    require_same_installation,
    why_misplaced,
)
from forgekeeper.platform.settings import DeletionPlace, Settings
from forgekeeper.sources.outbox import LOCATIONS_BY_FILE_STORE
from forgekeeper.targets import sentinel

BlockReason = Literal[
    "no_store",
    "no_repositories",
    "git_server",
    "flag_unreadable",
    "installation",
    "redis_replaced",
    "clocks",
    "schema",
]
PRECONDITION_REASONS: tuple[str, ...] = get_args(BlockReason)
"""A closed set, used for labels of metrics and for entries of the ledger."""
UNIVERSAL_ENCODINGS = {"UTF8", "SQL_ASCII"}
"""Encodings that can store every text.  SQL_ASCII stores any bytes."""
CLOCK_NAMES = {"postgresql": "PostgreSQL's clock", "redis": "Redis's clock", "host": "this machine's clock"}

GUARD_TABLES: tuple[type[Base], ...] = (Hold, Batch, JobRun, RunTotal, Exclusion)
"""Tables with rows, found by text, that keep a run from deleting: stops, limits, exclusions."""

# Each table, and the tables below it if it is a view.  A view reads them as its owner, unless it has
# `security_invoker`.  Row security hides rows from the reader.
SELECT_UNDERLYING_RELATIONS = """
    with recursive reached (name, oid, reader) as (
        select name, to_regclass(name)::oid, quote_ident(current_user)::regrole::oid
        from unnest(%(names)s::text[]) as name
      union
        select reached.name, below.refobjid,
            case when exists (
                select from pg_options_to_table(view.reloptions)
                where option_name = 'security_invoker' and option_value::boolean
            ) then quote_ident(current_user)::regrole::oid else view.relowner end
        from reached
            join pg_class as view on view.oid = reached.oid and view.relkind in ('v', 'm')
            join pg_rewrite as rule on rule.ev_class = view.oid
            join pg_depend as below on below.classid = 'pg_rewrite'::regclass and below.objid = rule.oid
                and below.refclassid = 'pg_class'::regclass and below.refobjid <> view.oid
    )
    select name, c.oid::bigint, c.oid::regclass::text, c.relkind::text, c.oid = to_regclass(name)::oid,
        (select inhparent::regclass::text from pg_inherits where inhrelid = c.oid limit 1),
        array(
            select relid::oid::bigint from pg_partition_tree(pg_partition_root(c.oid)) where c.relispartition and isleaf
          union all
            select inhparent::bigint from pg_inherits where inhrelid = c.oid and not c.relispartition
        ),
        (
            select quote_ident(rolname) from pg_roles as reader
            where c.relrowsecurity and reader.oid = any(readers) and not (rolsuper or rolbypassrls)
                and (c.relforcerowsecurity or not pg_has_role(reader.oid, c.relowner, 'usage'))
            limit 1
        ),
        array(
            select distinct function.proname::text
            from pg_trigger as fires join pg_proc as function on function.oid = fires.tgfoid
            where fires.tgrelid = c.oid and not fires.tgisinternal
        )
    from (select name, oid, array_agg(reader) as readers from reached group by name, oid) as reached
        join pg_class as c on c.oid = reached.oid
    where c.relkind in ('r', 'p', 'v', 'm', 'f')
"""


class Blocked(Exception):
    """The batch must not go on here; the message is a sentence that says why, and what to do about it.

    It is raised before anything is changed, or between two chunks.  The run ends there without a retry: the next tick
    tries again.

    >>> @batch(cron="0 * * * *", budget=timedelta(minutes=1))
    ... def own_parcels(now: datetime) -> Rows[Parcel]:
    ...     \"\"\"Delete old parcels, unless the forge deletes them.\"\"\"
    ...     if settings().objects == "theirs":
    ...         raise Blocked("no_store", "the forge deletes its objects; set FORGEKEEPER_OBJECTS=ours")
    ...     return Rows(Parcel, since=Parcel.created_at, older_than=timedelta(days=7))
    """

    def __init__(self, reason: BlockReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def require_met(batch: BatchSpec, settings: Settings, *, claims: bool = True) -> None:
    """Raise `Blocked` if *batch* or a child of it must not work; called once, at first.

    A run claims a Redis without an owner.  A preview does not, and raises `redis.RedisError` if Redis is down.
    """
    if refused := why_text_is_refused():
        raise Blocked("schema", refused)
    _require_clocks(settings)
    try:
        _require_installation(batch.deletes_from, settings, claims=claims)
    except InstallationMismatch as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    _require_register(batch, begin=claims)
    for sentence in chain(
        find_relation_faults(batch, rights=claims),
        batch.misreadings(),
        _unknown_groups(batch),
        find_overlooked_rows(batch),
    ):
        raise Blocked("schema", sentence)


def why_text_is_refused() -> str | None:
    """Return a sentence if the database cannot store some paths or names, else None.

    The server states its encoding at the start of a session, so this sends no query.  Needs a connection.
    """
    encoding = database.connection().get_parameter_status("server_encoding")
    if encoding in UNIVERSAL_ENCODINGS:
        return None
    return (
        f"the encoding {encoding} of the database cannot store all characters of paths and names: dump the database,"
        " create a database with `encoding 'UTF8' template template0`, and restore the dump there"
    )


def _require_register(batch: BatchSpec, *, begin: bool) -> None:
    """Raise `Blocked` if Redis lacks the register of the batch.

    If Redis is down, the run fails by itself.
    """
    if batch.epoch_key is None:
        return
    with suppress(redis.RedisError) if begin else nullcontext():
        if lost := why_register_is_lost(batch, begin=begin):
            raise Blocked(REDIS_REPLACED_REASON, lost)


def _unknown_groups(batch: BatchSpec) -> Iterator[str]:
    """Yield a sentence if a group is excluded and its projects are unknown."""
    if (
        batch.can_exclude("group")
        and exclusions.has_exclusions(batch.name, "group")
        and (lacks := exclusions.why_no_groups())
    ):
        yield f"a group is excluded from {batch.name}, and {lacks}: `forgekeeper exclude list` shows the exclusion"


def _require_installation(deletes_from: DeletionPlace | None, settings: Settings, *, claims: bool) -> None:
    """Raise `InstallationMismatch` unless database, Redis and places to delete from have one owner.

    A copied or moved database does not agree until a person says which installation it is.  Redis and places that do
    not answer are left out: the batch fails if it needs them.  Without *claims* nothing is written, and a Redis that is
    down raises.
    """
    if said := why_misplaced():
        raise InstallationMismatch(said)
    ours = _claim_installation() if claims else _read_installation()
    if ours is None:
        return  # a worker will create the installation
    root = settings.repositories_root
    if deletes_from == "repositories" and root is not None:
        _require_place(lambda: sentinel.Folder(root), ours)
    for location, url in settings.object_stores.items():
        if deletes_from == "stores" or (deletes_from == "artifacts" and location in LOCATIONS_BY_FILE_STORE.values()):
            _require_place(partial(sentinel.Store, location, url.get_secret_value()), ours)


def _claim_installation() -> str:
    try:
        return require_same_installation()
    except redis.RedisError:
        return Installation.ensure_id()


def _read_installation() -> str | None:
    ours, theirs = Installation.find_id(), find_redis_owner(client)
    if ours is not None and theirs not in (None, ours):
        raise InstallationMismatch(mismatch_message(ours, theirs))
    return ours


def _require_place(opened: Callable[[], sentinel.Place], ours: str) -> None:
    with suppress(sentinel.PlaceUnreadable):
        at = opened()
        found = at.read_owner()
        if found is not None and (said := sentinel.why_not_ours(at, found, ours)):
            raise InstallationMismatch(said)


def _require_clocks(settings: Settings) -> None:
    """Raise `Blocked` if PostgreSQL's and Redis's clocks differ too much.

    It is then unknown which records are due.  If Redis is down, its clock is not checked: work that needs Redis fails
    by itself.
    """
    try:
        (found,) = compare_clocks("postgresql", "redis")
    except redis.RedisError:
        return
    if found.exceeds(settings.clock_tolerance):
        allowed = f"FORGEKEEPER_CLOCK_TOLERANCE allows {settings.clock_tolerance.total_seconds():g} s"
        raise Blocked("clocks", f"{found.as_sentence()} ({allowed})")


class ClockDifference(NamedTuple):
    """How far *clock* is ahead of *reference*, and the possible error of that, in seconds."""

    clock: str
    reference: str
    seconds: float
    doubt: float

    def exceeds(self, tolerance: timedelta) -> bool:
        """Return whether the clocks certainly differ by more than *tolerance*."""
        return abs(self.seconds) - self.doubt > tolerance.total_seconds()

    def as_sentence(self) -> str:
        """Return the difference as a sentence for people."""
        way = f"{abs(self.seconds):.0f} s {'ahead of' if self.seconds > 0 else 'behind'}"
        return f"{CLOCK_NAMES[self.clock]} is {way} {CLOCK_NAMES[self.reference]}; correct the wrong clock"


def compare_clocks(*clocks: str) -> list[ClockDifference]:
    """Read the clocks, or all, in quick succession, and compare every pair.

    Raises errors of the servers.
    """
    read = {name: _read_clock(name) for name in clocks or CLOCK_NAMES}
    return [
        ClockDifference(one, other, read[one][0] - read[other][0], read[one][1] + read[other][1])
        for one, other in combinations(read, 2)
    ]


def _read_clock(clock: str) -> tuple[float, float]:
    """Return the clock's distance from the monotonic clock and the possible error, in seconds."""
    began = time.monotonic()
    if clock == "postgresql":
        said = now().timestamp()
    elif clock == "redis":
        seconds, microseconds = client.time()
        said = seconds + microseconds / 1e6
    else:
        said = time.time()
    ended = time.monotonic()
    return said - (began + ended) / 2, (ended - began) / 2


def fits_relations(batch: BatchSpec) -> bool:
    """Return whether the batch can work on the forge's relations as they are."""
    return not any(find_relation_faults(batch, rights=False))


def find_missing_needs(batch: BatchSpec) -> list[str]:
    """Return the needs of the batch that the forge's relations lack, whatever the rights."""
    hidden = _find_closed_schemas(batch)
    return hidden or list(_describe_misfits(batch, relations.read_columns([one.sql for one in batch.relations])))


def _find_closed_schemas(batch: BatchSpec) -> list[str]:
    """Return the schemas that are closed to the role; a statement that names one would fail."""
    in_schemas = [one.model for one in batch.relations if name_parts(one.model)[0]]
    return list(schema.find_closed_schemas(in_schemas)) if in_schemas else []


def _describe_misfits(batch: BatchSpec, tables: relations.ColumnsByTable) -> Iterator[str]:
    if found := [said for one in batch.relations for said in relations.find_misfits(one.model, tables)]:
        yield f"{', '.join(found)}: `forgekeeper contract --batch {batch.name}` shows what the batch needs"


def find_relation_faults(batch: BatchSpec, *, rights: bool = True) -> Iterator[str]:
    """Yield why the batch cannot work on the forge's relations; with *rights*, as this role."""
    expected = batch.relations
    if hidden := _find_closed_schemas(batch):
        yield from hidden
        return
    tables = relations.read_columns([one.sql for one in expected])
    yield from _describe_misfits(batch, tables)
    yield from find_misreadings((*batch.tables, *batch.reads, *GUARD_TABLES), tables)
    if views := [one for one in expected if relations.is_view(tables.get(one.sql, {}))]:
        yield from find_refused_changes(views, tables)
    yield from foreign_key_effects.find_undeclared_tables(batch, tables)
    if rights:
        yield from relations.find_missing_privileges(
            {one.model: one.needed_privileges("worker") for one in expected}, tables
        )


def find_overlooked_rows(batch: BatchSpec) -> Iterator[str]:
    """Yield a sentence for each relation in which lookups miss rows of a sample.

    Only checks batches that delete objects without a row that names them.  The catalogue is not consulted.  The
    relations have to fit, and this role needs the right to read them.
    """
    for model in (*batch.tables, *batch.reads) if batch.deletes_from in ("artifacts", "stores") else ():
        if missed := sorted(model.overlooked()):
            tables = ", ".join(one.called for one in list_underlying([model]) if one.kind in ("r", "p"))
            yield (
                f"lookups miss existing rows of {shown_name(model)}, for example {missed[0]}: an index is damaged;"
                f" rebuild it with `reindex table concurrently` of {tables}"
            )


class UnderlyingRelation(NamedTuple):
    """A relation, or a relation below it, with its kind and the name that it is *called*."""

    name: str
    oid: int
    called: str
    kind: str
    is_itself: bool
    parent: str | None
    sibling_oids: list[int]
    hidden_from: str | None
    trigger_functions: list[str]


def list_underlying(models: Sequence[type[Base]]) -> list[UnderlyingRelation]:
    """Return the relations that each model's relation is made of, by one statement."""
    names = [relation_name(model) for model in models]
    return [
        UnderlyingRelation(*row)
        for row in execute_prepared("relations", SELECT_UNDERLYING_RELATIONS, {"names": names}).fetchall()
    ]


def find_misreadings(models: Sequence[type[Base]], tables: relations.ColumnsByTable) -> Iterator[str]:
    """Yield a sentence for each way in which statements on the *models* would miss rows."""
    found, shown = list_underlying(models), {relation_name(model): shown_name(model) for model in models}
    yield from reasons_to_miss_rows({one.oid for one in found})
    if views := [one.oid for one in found if one.is_itself and one.kind == "v"]:
        yield from find_changed_views(views)
    for one in found:
        reached = {other.oid for other in found if other.name == one.name}
        if said := _find_objection(one._replace(name=shown[one.name]), reached):
            yield said
    for model in models:
        table, columns = shown_name(model), tables.get(relation_name(model), {})
        for key in model.found_by:
            if (column := columns.get(key)) is not None and column.is_not_null is False:
                yield (
                    f"column {table}.{key} may be NULL, and rows with NULL are never found: "
                    f"`alter table {table} alter column {key} set not null`"
                )


def _find_objection(relation: UnderlyingRelation, reached: set[int]) -> str | None:
    table = relation.name
    which = table if relation.is_itself else f"view {table} reads {relation.called}, which"
    if relation.trigger_functions and (why := signs.why_refused(relation.trigger_functions)):
        return f"{which} {why}"
    if not reached.issuperset(relation.sibling_oids):
        parent = relation.parent
        return (
            f"{which} is a part of {parent}, and lookups miss the rest of {parent}: replace it with a view of {parent}"
        )
    if relation.kind == "m":
        return f"{which} is a materialized view, whose rows may be out of date: replace it with a plain view"
    if relation.kind == "f":
        return f"{which} is a foreign table, whose rows a batch cannot lock: connect to the database of that table"
    if role := relation.hidden_from:
        return f"row security hides rows of {relation.called} from {role}: `alter role {role} bypassrls`"
    return None
