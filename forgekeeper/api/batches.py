"""Declarations of batches and children, the flags that switch them, and their registry.

`forgekeeper.engine.decorators` makes the declarations.  Everything else is derived from them: the actor, settings,
metrics, counting, the exporter's looks, `status`, failpoints, dashboards, documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import peewee as pw
from dramatiq import Actor, Broker, Message
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.answers import Backlog, DueFunction, Mistake, Rows, Subject
from forgekeeper.api.buckets import Buckets
from forgekeeper.api.inspection import InspectionHooks
from forgekeeper.api.objects import Objects
from forgekeeper.api.records import Fields, Record
from forgekeeper.api.refs import Refs
from forgekeeper.platform.database import Base, database, default_sql
from forgekeeper.platform.database.queries import AffectedShareReader, share_as_read_only
from forgekeeper.platform.database.read_only import as_read_only
from forgekeeper.platform.database.relations import Relation, is_ours
from forgekeeper.platform.settings import DeletionPlace
from metrics.catalogue import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


OutcomeType = TypeVar("OutcomeType", bound="DataclassInstance")
OldRowsFunction = TypeVar("OldRowsFunction", bound="Callable[[datetime], Rows[Any]]")
FindRepositories = Callable[[], list[str]]
FindKnownObjects = Callable[[str], Sequence[str]]


class NotSent(Exception):
    """No run of the batch may start now; the message says why."""


class Threshold(NamedTuple):
    """A limit from the batch's document: a breach is a value of *name* that is *above* it.

    Durations are in seconds.  A number of consecutive failures that equals the limit is a breach, too.  A backlog is
    the number of records that a run has left: its *found* fields less its *done* fields, or without fields all due
    records.

    >>> threshold = Threshold("duration", above=60)
    """

    name: Literal["duration", "backlog", "consecutive_failures", "dead_letter"]
    above: float = 0
    found: Fields = ()
    done: Fields = ()


@dataclass(kw_only=True, eq=False)
class Declaration(InspectionHooks, Actor[..., None]):
    """Base class of batches and children: each is an actor once the process has a broker."""

    sentence: str
    module: str
    document: int | None = None
    queue: str = "cron"
    team: str = "operations"
    budget: timedelta
    time_limit: timedelta
    outcome: type[DataclassInstance]
    work: Callable[..., None]
    records: tuple[Record, ...]
    thresholds: Sequence[Threshold] = ()
    counters: Sequence[Counter] = ()
    due_of_all_children: DueFunction | None = None
    parent_batch: BatchSpec | None = None
    continues: Sequence[str] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    lease: bool = False
    logged_as: str | None = None
    old_row_functions: list[Callable[[datetime], Rows[Any]]] = field(default_factory=list)

    def bind_actor(self, broker: Broker, work: Callable[..., None], **options: Any) -> None:
        """Become an actor of the broker, which calls *work* with the arguments of a message."""
        limit = round(self.time_limit.total_seconds() * 1000)
        names = {"actor_name": self.name, "queue_name": self.queue}
        Actor.__init__(self, work, broker=broker, priority=0, options={"time_limit": limit, **options}, **names)

    @property
    def batch(self) -> BatchSpec:
        """The batch itself, or the batch of this child."""
        return cast("BatchSpec", self.parent_batch or self)

    @property
    def parent_name(self) -> str | None:
        """The name of a child's batch; None for a batch."""
        return None if self.parent_batch is None else self.parent_batch.name

    @cached_property
    def counted_fields(self) -> Fields:
        """The fields of the outcome that limits count: processed records with an objective."""
        return tuple(field for record in self.records if record.objective for field in record.processed)

    @cached_property
    def counted_byte_fields(self) -> Fields:
        """The fields of the outcome that count the bytes of these records."""
        return tuple(field for record in self.records for field in record.bytes)

    def old_records(self, old: OldRowsFunction) -> OldRowsFunction:
        """Let housekeeping remove the rows that the function returns: old rows, long processed."""
        self.old_row_functions.append(old)
        return old

    def find_threshold(self, name: str) -> Threshold | None:
        """Return the threshold of that name; None if the document lacks it."""
        return next((one for one in self.thresholds if one.name == name), None)


@dataclass(kw_only=True, eq=False)
class BatchSpec(Declaration):
    """The declaration of a batch; its row in the database is `forgekeeper.ledger.holds.Batch`.

    Its *restorable* rows can be inserted back while their objects are there.  It deletes the objects of the queues in
    *emptied_tables*.
    """

    cron: str
    flag: str | None = None
    tables: Sequence[type[Base]] = ()
    reads: Sequence[type[Base]] = ()
    walked_columns: dict[type[Base], str] = field(default_factory=dict)
    deletes_from: DeletionPlace | None = None
    released_with: str | None = None
    epoch_key: str | None = None
    misreadings: Callable[[], Sequence[str]] = tuple
    writes: str | None = None
    sender: Callable[[BatchSpec], Message[None]] | None = None
    stake: AffectedShareReader | None = None
    children: list[ChildSpec] = field(default_factory=list)
    commands: str | None = None
    buckets: Buckets | None = None
    restorable: list[Rows[Any]] = field(default_factory=list)
    emptied_tables: list[type[Base]] = field(default_factory=list)
    known_repositories: list[FindRepositories] = field(default_factory=list)
    known_objects: list[FindKnownObjects] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)
    registered_objects: Objects[Any] | None = None

    def send_with_options(self, *, args: tuple[()] = (), **options: Any) -> Message[None]:
        """Send a manual run through the ledger, or the open run again; return the message.

        Raises `TypeError` for arguments and options, `NotSent` if no run may start, `RuntimeError` without a broker.
        """
        if args or any(options.values()):
            raise TypeError(
                f"{self.name} is a batch: send() has no arguments, as the ledger has one run of it at a time"
            )
        if self.sender is None:
            raise RuntimeError(f"{self.name} cannot be sent before forgekeeper.delivery.broker.load_batches()")
        return self.sender(self)

    def add_known_repositories(self, look: FindRepositories) -> FindRepositories:
        """Let `check` ask the function for some repositories that should exist below the root."""
        self.known_repositories.append(as_read_only(self.name, look))
        return look

    def add_known_objects(self, look: FindKnownObjects) -> FindKnownObjects:
        """Let `check` ask the function for some objects that should exist at a location."""
        self.known_objects.append(as_read_only(self.name, look))
        return look

    def add_subject(self, subject: Subject) -> None:
        """Let `forgekeeper audit` find the batch's deletions by the name that people use."""
        self.subjects.append(subject)

    def list_obstacles(self) -> Iterator[str]:
        """Yield why deletions, elsewhere reversible, cannot be undone here; needs a connection."""
        yield from filter(None, (one.obstacle() for one in self.subjects if one.obstacle))

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The forge's tables and views that the batch changes or only reads."""
        expected = dict.fromkeys(self.tables, False) | dict.fromkeys(self.reads, True)
        return tuple(
            Relation(model, reads=reads, since=self.walked_columns.get(model))
            for model, reads in expected.items()
            if not is_ours(model) and (model.is_used is None or model.is_used())
        )

    @property
    def deletes_records(self) -> bool:
        """Whether the batch or a child of it deletes the forge's records, so that guards apply."""
        return any(one.counted_fields for one in (self, *self.children))

    def can_exclude(self, kind: str) -> bool:
        """Return whether exclusions of that kind can apply to the batch or a child of it."""
        by = "project" if kind == "group" else kind
        return any(by in record.excluded_by for one in (self, *self.children) for record in one.records)

    def at_stake(self, look: AffectedShareReader) -> AffectedShareReader:
        """Let the breaker ask the function for the numbers of due records and of all records.

        Both include the records of the batch's children.  Only the first such function is asked.
        """
        self.stake = self.stake or share_as_read_only(self.name, look)
        return look

    def sum_backlogs(self, now: datetime) -> Backlog | None:
        """Add up the backlogs of the batch and its children; return None if none is declared."""
        every = (self, *self.children)
        counted = {record.name for one in every for record in one.records if record.objective}
        found = [look(now) for one in every for record, look in one.backlogs.items() if record in counted]
        oldest = min((one.oldest for one in found if one.oldest), default=None)
        return Backlog(sum(one.records for one in found), oldest) if found else None

    @property
    def shortest_objective(self) -> timedelta | None:
        """The shortest objective of the records in the backlog."""
        counted = (record for one in (self, *self.children) for record in one.records if record.name in one.backlogs)
        return min((record.objective for record in counted if record.objective), default=None)


@dataclass(kw_only=True, eq=False)
class ChildSpec(Declaration):
    """The declaration of a child; its parent's outcome counts sent children in *enqueued_as*."""

    parent_batch: BatchSpec
    enqueued_as: str = "children_enqueued"
    continues: Sequence[str] = ("deadline",)
    refs: Refs[Any] | None = None


# PostgreSQL leaves a schema that the role may not use out of its search_path.
SELECT_FORGE_FLAGS_RELATION = """
    select nspname || '.' || relname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where pg_class.oid = to_regclass('forge_flags')
"""
SELECT_FORGE_FLAG = "select enabled from forge_flags where name = %s and enabled"


class FeatureFlag(Base):
    """A flag that somebody has turned at least once.  If the forge has flags, those are read."""

    grants = "person: insert, update; worker: select; exporter: select"

    name = pw.TextField(primary_key=True)
    enabled = pw.BooleanField(constraints=default_sql("false"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "feature_flags"

    @classmethod
    def is_on(cls, name: str) -> bool:
        """Return whether the flag is on; a flag that was never turned is off."""
        if cls.find_forge_relation() is not None:
            return database.execute_sql(SELECT_FORGE_FLAG, (name,)).fetchone() is not None
        return cls.select().where(cls.name == name, cls.enabled).exists()

    @classmethod
    def find_forge_relation(cls) -> str | None:
        """Return the forge's relation with all flags; None if the flags are forgekeeper's own."""
        found = database.execute_sql(SELECT_FORGE_FLAGS_RELATION).fetchone()
        return found and str(found[0])

    @classmethod
    def turn(cls, name: str, *, on: bool) -> bool:
        """Turn a flag on or off for every process; return whether it was on.

        Each process sees the change at its next look.
        """
        now = pw.fn.clock_timestamp()
        # The lock keeps others from turning the flag between this look and the insert.
        was_on: bool = cls.select(cls.enabled).where(cls.name == name).for_update().scalar() or False
        cls.insert(name=name, enabled=on, updated_at=now).on_conflict(
            conflict_target=[cls.name], update={cls.enabled: on, cls.updated_at: now}
        ).execute()
        return was_on


FLAGS: dict[str, str] = {}
"""Every flag that a batch declares, with its description; a flag without a row is off."""
BATCHES: dict[str, BatchSpec] = {}
"""Every batch by its name, in the order of declaration."""
CHILDREN: dict[str, ChildSpec] = {}
"""Every child by its name."""


def all_declared() -> Iterator[Declaration]:
    """Yield every batch, then every child."""
    yield from BATCHES.values()
    yield from CHILDREN.values()


def find_declaration(name: str) -> Declaration | None:
    """Return the batch or child of that name, or None."""
    return BATCHES.get(name) or CHILDREN.get(name)


def find_batch_name(name: str) -> str:
    """Return the batch's name for the name of a batch or child; return other names unchanged."""
    declared = find_declaration(name)
    return name if declared is None else declared.batch.name


def list_queues() -> tuple[str, ...]:
    """Return the names of the queues of all batches and children, each once."""
    return tuple(dict.fromkeys(one.queue for batch in BATCHES.values() for one in (batch, *batch.children)))


def register_declaration(declared: Declaration) -> None:
    """Register a batch or a child; raise `Mistake` if its name is taken."""
    known = find_declaration(declared.name)
    if known is not None:
        where = f"in {known.module} and in {declared.module}"
        raise Mistake(f"{declared.name} is declared twice, {where}; rename one of them")
    if isinstance(declared, BatchSpec):
        BATCHES[declared.name] = declared
        FLAGS.update(declared.flags)
    elif isinstance(declared, ChildSpec):
        CHILDREN[declared.name] = declared
        declared.parent_batch.children.append(declared)
