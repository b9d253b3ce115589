"""What a batch or a child is declared to be, the flags that switch it, and the registry of all that are declared.

`forgekeeper.engine.decorators` makes the declarations.  All else is derived from them: the actor, settings, metrics,
counting, what the exporter asks, `status`, failpoints, dashboards, documentation.
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

from forgekeeper.api.answers import Backlog, Due, Mistake, Rows, Subject
from forgekeeper.api.buckets import Buckets
from forgekeeper.api.objects import Objects
from forgekeeper.api.refs import Refs
from forgekeeper.api.shown import Shown
from forgekeeper.platform.database import Base, database, default
from forgekeeper.platform.database.looking import as_look
from forgekeeper.platform.database.queries import AtStake, stake_as_look
from forgekeeper.platform.database.relations import Relation, is_ours
from forgekeeper.platform.settings import Place
from metrics.catalogue import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Outcome = TypeVar("Outcome", bound="DataclassInstance")
Old = TypeVar("Old", bound="Callable[[datetime], Rows[Any]]")
Repositories = Callable[[], list[str]]
KnownObjects = Callable[[str], Sequence[str]]
Fields = tuple[str, ...]
"""Fields of an outcome, added up."""


class NotSent(Exception):
    """No run of the batch may start now; the message says why."""


class Threshold(NamedTuple):
    """A number of the document, *name*d by its label, that is crossed *above* its limit.

    A backlog is what a run has left: the *found* fields of its outcome less those *done*; without any, what is due.

    >>> threshold = Threshold("duration", above=60)
    """

    name: Literal["duration", "backlog", "consecutive_failures", "dead_letter"]
    above: float = 0
    found: Fields = ()
    done: Fields = ()


@dataclass(frozen=True)
class Record:
    """A kind of record that a batch works on, and which fields of its outcome count it.

    *errors* maps each kind of error to the fields that count it; no fields where bad records are counted one by one
    as they fail.  *objective* is how long a due record may wait; *backlog* says that due ones are counted
    though they have none; *refused*, that they lie in quarantine.  *bytes* are the fields that add their sizes up.
    *excluded_by* says what people can exclude them by: their ``project``, the ``pattern`` of their names.

    >>> record = Record("pipeline", processed=("deleted",), objective=timedelta(hours=1))
    """

    name: str
    examined: Fields = ()
    processed: Fields = ()
    errors: Mapping[str, Fields] = field(default_factory=dict)
    objective: timedelta | None = None
    backlog: bool = False
    refused: bool = False
    bytes: Fields = ()
    excluded_by: tuple[str, ...] = ()

    @property
    def quarantined(self) -> bool:
        """Whether some may lie in quarantine: bad ones, or those that were refused."""
        return self.refused or bool({"database", "state_transition"} & self.errors.keys())


@dataclass(kw_only=True, eq=False)
class Declared(Shown, Actor[..., None]):
    """What batches and children have in common: each is an actor, once the process has a broker."""

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
    whole: Due | None = None
    of: BatchSpec | None = None
    continues: Sequence[str] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    lease: bool = False
    logged_as: str | None = None
    old: list[Callable[[datetime], Rows[Any]]] = field(default_factory=list)

    def bind(self, broker: Broker, work: Callable[..., None], **options: Any) -> None:
        """Become an actor of the broker, which calls *work* with the arguments of a message."""
        limit = round(self.time_limit.total_seconds() * 1000)
        names = {"actor_name": self.name, "queue_name": self.queue}
        Actor.__init__(self, work, broker=broker, priority=0, options={"time_limit": limit, **options}, **names)

    @property
    def batch(self) -> BatchSpec:
        """The batch itself, or that of which this is a child."""
        return cast("BatchSpec", self.of or self)

    @property
    def parent(self) -> str | None:
        """The name of the batch of which this is a child, None of a batch."""
        return None if self.of is None else self.of.name

    @cached_property
    def counted(self) -> Fields:
        """The fields of the outcome by which limits go: what was done of the records that have an objective."""
        return tuple(field for record in self.records if record.objective for field in record.processed)

    @cached_property
    def counted_bytes(self) -> Fields:
        """The fields of the outcome that say how many bytes that were."""
        return tuple(field for record in self.records for field in record.bytes)

    def old_records(self, old: Old) -> Old:
        """Let housekeeping remove the rows that the function returns: those that the batch was done with long ago."""
        self.old.append(old)
        return old

    def limit(self, name: str) -> Threshold | None:
        """Return the threshold of that name, None where the document has none."""
        return next((one for one in self.thresholds if one.name == name), None)


@dataclass(kw_only=True, eq=False)
class BatchSpec(Declared):
    """The declaration of a batch; its row in the database is `forgekeeper.ledger.holds.Batch`.

    Its *restorable* rows can be inserted back while their objects are there.  It deletes the objects of the queues in
    the tables *emptied*.
    """

    cron: str
    flag: str | None = None
    tables: Sequence[type[Base]] = ()
    reads: Sequence[type[Base]] = ()
    walks: dict[type[Base], str] = field(default_factory=dict)
    deletes_from: Place | None = None
    released_with: str | None = None
    epoch_key: str | None = None
    misreadings: Callable[[], Sequence[str]] = tuple
    writes: str | None = None
    sender: Callable[[BatchSpec], Message[None]] | None = None
    stake: AtStake | None = None
    children: list[ChildSpec] = field(default_factory=list)
    commands: str | None = None
    buckets: Buckets | None = None
    restorable: list[Rows[Any]] = field(default_factory=list)
    emptied: list[type[Base]] = field(default_factory=list)
    known_repositories: list[Repositories] = field(default_factory=list)
    known_objects: list[KnownObjects] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)
    registered: Objects[Any] | None = None

    def send_with_options(self, *, args: tuple[()] = (), **options: Any) -> Message[None]:
        """Send a run by hand, through the ledger, or again the one that is open; return its message.

        Raises `TypeError` for arguments and options, `NotSent` where no run may start, `RuntimeError` without a broker.
        """
        if args or any(options.values()):
            raise TypeError(f"{self.name} is a batch: send() takes nothing, as the ledger has one run of it at a time")
        if self.sender is None:
            raise RuntimeError(f"{self.name} cannot be sent before forgekeeper.delivery.broker.load_batches()")
        return self.sender(self)

    def repositories(self, look: Repositories) -> Repositories:
        """Let `check` ask the function where some repositories should be, below the root."""
        self.known_repositories.append(as_look(self.name, look))
        return look

    def objects(self, look: KnownObjects) -> KnownObjects:
        """Let `check` ask the function for some objects that should be at a location."""
        self.known_objects.append(as_look(self.name, look))
        return look

    def audited(self, subject: Subject) -> None:
        """Let `audit --what` ask for what the batch deletes, by a name that people have for it."""
        self.subjects.append(subject)

    def obstacles(self) -> Iterator[str]:
        """Say what of its deletions cannot be undone here, though it can elsewhere; needs a connection."""
        yield from filter(None, (one.obstacle() for one in self.subjects if one.obstacle))

    @property
    def relations(self) -> tuple[Relation, ...]:
        """What it expects of the forge: each table or view of which rows go with it, and those that it only reads."""
        expected = dict.fromkeys(self.tables, False) | dict.fromkeys(self.reads, True)
        return tuple(
            Relation(model, reads=reads, since=self.walks.get(model))
            for model, reads in expected.items()
            if not is_ours(model) and (model.is_used is None or model.is_used())
        )

    @property
    def deletes(self) -> bool:
        """Whether it deletes what is the forge's, itself or by its children: then brakes are for it."""
        return any(one.counted for one in (self, *self.children))

    def excludes(self, kind: str) -> bool:
        """Say whether exclusions of that kind can keep anything from the batch, or from a child of it."""
        by = "project" if kind == "group" else kind
        return any(by in record.excluded_by for one in (self, *self.children) for record in one.records)

    def at_stake(self, look: AtStake) -> AtStake:
        """Let the breaker ask the function how much is due of how much there is, of the batch and its children."""
        self.stake = self.stake or stake_as_look(self.name, look)
        return look

    def due(self, now: datetime) -> Backlog | None:
        """Add up what is due to the batch and its children; None where nothing says so."""
        every = (self, *self.children)
        counted = {record.name for one in every for record in one.records if record.objective}
        found = [look(now) for one in every for record, look in one.backlogs.items() if record in counted]
        oldest = min((one.oldest for one in found if one.oldest), default=None)
        return Backlog(sum(one.records for one in found), oldest) if found else None


@dataclass(kw_only=True, eq=False)
class ChildSpec(Declared):
    """The declaration of a child; *enqueued_as* is the field of its parent's outcome that counts those sent."""

    of: BatchSpec
    enqueued_as: str = "children_enqueued"
    continues: Sequence[str] = ("deadline",)
    refs: Refs[Any] | None = None


# A schema that the role may not use is no part of its search_path.
FORGE_S = """
    select nspname || '.' || relname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where pg_class.oid = to_regclass('forge_flags')
"""
ON_THERE = "select enabled from forge_flags where name = %s and enabled"


class FeatureFlag(Base):
    """A flag that somebody has turned at least once.  Where the forge has flags, these are asked and ours are not."""

    grants = "person: insert, update; worker: select; exporter: select"

    name = pw.TextField(primary_key=True)
    enabled = pw.BooleanField(constraints=default("false"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "feature_flags"

    @classmethod
    def is_on(cls, name: str) -> bool:
        """Say whether the flag is on; one that was never turned is off."""
        if cls.owner() is not None:
            return database.execute_sql(ON_THERE, (name,)).fetchone() is not None
        return cls.select().where(cls.name == name, cls.enabled).exists()

    @classmethod
    def owner(cls) -> str | None:
        """Name the relation of the forge that has all flags, None where there is none and they are ours."""
        found = database.execute_sql(FORGE_S).fetchone()
        return found and str(found[0])

    @classmethod
    def turn(cls, name: str, *, on: bool) -> bool:
        """Turn a flag on or off for every process, from its next look on; return whether it was on."""
        now = pw.fn.clock_timestamp()
        # Locked, it is not turned between this look and what follows.
        was_on: bool = cls.select(cls.enabled).where(cls.name == name).for_update().scalar() or False
        cls.insert(name=name, enabled=on, updated_at=now).on_conflict(
            conflict_target=[cls.name], update={cls.enabled: on, cls.updated_at: now}
        ).execute()
        return was_on


FLAGS: dict[str, str] = {}
"""Every flag that a batch declares, and what it switches; one that has no row is off."""
BATCHES: dict[str, BatchSpec] = {}
"""Every batch by its name, in the order of declaration."""
CHILDREN: dict[str, ChildSpec] = {}
"""Every child by its name."""


def all_declared() -> Iterator[Declared]:
    """Yield every batch, then every child."""
    yield from BATCHES.values()
    yield from CHILDREN.values()


def spec(name: str) -> Declared | None:
    """Return the batch or child of that name, None where there is none."""
    return BATCHES.get(name) or CHILDREN.get(name)


def batch_of(name: str) -> str:
    """Return the name of the batch that is called so, or that has a child which is."""
    declared = spec(name)
    return name if declared is None else declared.batch.name


def queues() -> tuple[str, ...]:
    """Name the queues of all batches and children, each once."""
    return tuple(dict.fromkeys(one.queue for batch in BATCHES.values() for one in (batch, *batch.children)))


def register(declared: Declared) -> None:
    """Make a batch or a child known; raise `Mistake` where another has its name."""
    known = spec(declared.name)
    if known is not None:
        where = f"in {known.module} and in {declared.module}"
        raise Mistake(f"{declared.name} is declared twice, {where}; rename one of them")
    if isinstance(declared, BatchSpec):
        BATCHES[declared.name] = declared
        FLAGS.update(declared.flags)
    elif isinstance(declared, ChildSpec):
        CHILDREN[declared.name] = declared
        declared.of.children.append(declared)
