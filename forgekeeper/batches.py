"""What a batch declares, and the registry of all that have been declared.

A document's module declares its batch with `@batch` and its children with `@child`.  All else is derived from
that: the actor and its time limit, the settings ``CRON_…``, ``CATCH_UP_…`` and ``PACE_…``, label sets and zero
series, counting, what the exporter asks, `status`, failpoints, dashboards, documentation.  Declaring does nothing:
`forgekeeper.process.boot` makes actors of what has been declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar

import peewee as pw

from forgekeeper.brought import Brought
from forgekeeper.database import Base
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.stakes import AtStake
from forgekeeper.flags import FLAGS
from forgekeeper.settings import Place
from forgekeeper.shown import Shown
from metrics.catalogue.metric import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from forgekeeper.runs.run import Run

Outcome = TypeVar("Outcome", bound="DataclassInstance")
Arguments = ParamSpec("Arguments")
Older = TypeVar("Older", bound="Callable[[datetime], pw.ModelSelect[Any]]")
Fields = tuple[str, ...]
"""Fields of an outcome, added up."""


class DeclaredTwice(Exception):
    """Two batches or children have one name; the message says which, and where they are."""


class Threshold(NamedTuple):
    """A number of the document beyond which it counts as crossed: *name* is the label, *above* its limit.

    A backlog is what a run has left: the *found* fields of its outcome less those *done*; without any, what is due.
    """

    name: Literal["duration", "backlog", "consecutive_failures", "dead_letter"]
    above: float = 0
    found: Fields = ()
    done: Fields = ()


@dataclass(frozen=True)
class Record:
    """A kind of record that a batch works on, and which fields of its outcome count it.

    *errors* maps each kind of error to the fields that count it; no fields where bad records are counted one by one
    as they are passed over.  *objective* is how long a due record may wait; *backlog* says that due ones are counted
    though they have none; *given_up*, that some wait for a person.  *bytes* are the fields that add their sizes up.
    """

    name: str
    examined: Fields = ()
    processed: Fields = ()
    errors: Mapping[str, Fields] = field(default_factory=dict)
    objective: timedelta | None = None
    backlog: bool = False
    given_up: bool = False
    bytes: Fields = ()

    @property
    def passed_over(self) -> bool:
        """Whether a bad one is passed over for a growing while."""
        return bool({"database", "state_transition"} & self.errors.keys())


class OldRecords(NamedTuple):
    """Records of a kind that go when they are old: *older* selects those that were done with before an instant."""

    record: str
    keep: timedelta
    older: Callable[[datetime], pw.ModelSelect[Any]]


class Schedule(NamedTuple):
    """The defaults of a batch's own settings, and the sentences that document them."""

    cron: str
    cron_sentence: str
    pace_sentence: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Declared(Shown):
    """What batches and children have in common."""

    sentence: str
    module: str
    document: int | None
    queue: str
    team: str
    budget: timedelta
    time_limit: timedelta
    outcome: type[DataclassInstance]
    work: Callable[..., None]
    records: tuple[Record, ...]
    thresholds: tuple[Threshold, ...]
    steps: tuple[str, ...]
    counters: tuple[Counter, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    lease: bool = False
    old: list[OldRecords] = field(default_factory=list)

    @property
    def batch(self) -> BatchSpec:
        """The batch itself, or that of which this is a child."""
        raise NotImplementedError

    @property
    def parent(self) -> str | None:
        """The name of the batch of which this is a child, None of a batch."""
        return None

    @cached_property
    def counted(self) -> Fields:
        """The fields of the outcome by which limits go: what was done of the records that have an objective."""
        return tuple(field for record in self.records if record.objective for field in record.processed)

    @cached_property
    def counted_bytes(self) -> Fields:
        """The fields of the outcome that say how many bytes that were."""
        return tuple(field for record in self.records for field in record.bytes)

    def old_records(self, record: str, *, keep: timedelta) -> Callable[[Older], Older]:
        """Let rows of *record* be removed that the function selects: those done with before an instant *keep* ago."""

        def declare(older: Older) -> Older:
            self.old.append(OldRecords(record, keep, older))
            return older

        return declare

    def limit(self, name: str) -> Threshold | None:
        """Return the threshold of that name, None where the document has none."""
        return next((one for one in self.thresholds if one.name == name), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSpec(Declared, Brought):
    """The declaration of a batch; its row in the database is `forgekeeper.runs.batch.Batch`."""

    schedule: Schedule
    flag: str | None
    tables: tuple[type[Base], ...]
    deletes_from: Place | None
    misreadings: Callable[[], Sequence[str]]
    stakes: list[AtStake] = field(default_factory=list)
    children: list[ChildSpec] = field(default_factory=list)

    @property
    def batch(self) -> BatchSpec:
        """The batch itself."""
        return self

    @property
    def nothing(self) -> DataclassInstance:
        """The outcome of a run that did nothing."""
        return self.outcome()

    @property
    def deletes(self) -> bool:
        """Whether it deletes what is the forge's, itself or by its children: then brakes are for it."""
        return any(one.counted for one in (self, *self.children))

    def at_stake(self, look: AtStake) -> AtStake:
        """Let the breaker ask the function how much is due of how much there is, of the batch and its children."""
        self.stakes.append(look)
        return look

    @property
    def stake(self) -> AtStake | None:
        """What the breaker asks, None where nothing says what is at stake."""
        return self.stakes[0] if self.stakes else None

    def due(self, now: datetime) -> Backlog | None:
        """Add up what is due to the batch and its children; None where nothing says so."""
        looks = [look for one in (self, *self.children) for look in one.backlogs.items()]
        found = [look(now) for record, look in looks if self._has_objective(record)]
        if not found:
            return None
        oldest = min((one.oldest for one in found if one.oldest), default=None)
        return Backlog(sum(one.records for one in found), oldest)

    def _has_objective(self, record: str) -> bool:
        return any(one.name == record and one.objective for spec in (self, *self.children) for one in spec.records)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChildSpec(Declared):
    """The declaration of a child; *enqueued_as* is the field of its parent's outcome that counts those sent."""

    of: BatchSpec
    enqueued_as: str

    @property
    def batch(self) -> BatchSpec:
        """The batch of which this is a child."""
        return self.of

    @property
    def parent(self) -> str | None:
        """The name of that batch."""
        return self.of.name


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


def queues() -> tuple[str, ...]:
    """Name the queues of all batches and children, each once."""
    declared = (one for batch in BATCHES.values() for one in (batch, *batch.children))
    return tuple(dict.fromkeys(one.queue for one in declared))


def batch(
    *,
    document: int | None = None,
    cron: str,
    cron_sentence: str,
    pace_sentence: str,
    budget: timedelta,
    time_limit: timedelta,
    outcome: type[Outcome],
    team: str = "operations",
    queue: str = "cron",
    records: Sequence[Record] = (),
    thresholds: Sequence[Threshold] = (),
    steps: Sequence[str] = (),
    counters: Sequence[Counter] = (),
    collector: str | None = None,
    flag: str | None = None,
    flags: Mapping[str, str] | None = None,
    tables: Sequence[type[Base]] = (),
    deletes_from: Place | None = None,
    misreadings: Callable[[], Sequence[str]] = tuple,
    commands: str | None = None,
) -> Callable[[Callable[[Run[Outcome]], None]], BatchSpec]:
    """Declare a batch: a function of its run, whose first sentence says what it does.

    *budget* is the document's, at whose end a run stops by itself; after *time_limit* it is killed.  Of *tables* it
    is asked before each run whether its statements would misread them; *misreadings* may say more.  *flags* are those
    that it reads, each with what it switches; by *flag* it is switched off.  *collector* is the exporter's label for
    who reads its backlogs, if it is not the batch's name.
    *commands* is a module, imported by the command line alone, whose `COMMANDS` maps names to commands or groups.
    """

    def declare(work: Callable[[Run[Outcome]], None]) -> BatchSpec:
        declared = BatchSpec(
            **_common(work, records, thresholds, steps, counters),
            collected_as=collector or work.__name__,
            document=document,
            queue=queue,
            team=team,
            budget=budget,
            time_limit=time_limit,
            outcome=outcome,
            schedule=Schedule(cron, cron_sentence, pace_sentence),
            flag=flag,
            flags=flags or {},
            tables=tuple(tables),
            deletes_from=deletes_from,
            misreadings=misreadings,
            commands=commands,
        )
        BATCHES[_new(declared)] = declared
        FLAGS.update(declared.flags)
        return declared

    return declare


def child(
    of: BatchSpec,
    *,
    queue: str,
    budget: timedelta,
    time_limit: timedelta,
    outcome: type[Outcome],
    enqueued_as: str,
    records: Sequence[Record] = (),
    thresholds: Sequence[Threshold] = (),
    steps: Sequence[str] = (),
    counters: Sequence[Counter] = (),
    collector: str | None = None,
    lease: bool = False,
) -> Callable[[Callable[Concatenate[Run[Outcome], Arguments], None]], ChildSpec]:
    """Declare the child of a batch's fan-out: a function of its run and of ids; running it twice is harmless."""

    def declare(work: Callable[Concatenate[Run[Outcome], Arguments], None]) -> ChildSpec:
        declared = ChildSpec(
            **_common(work, records, thresholds, steps, counters),
            collected_as=collector or work.__name__,
            document=of.document,
            queue=queue,
            team=of.team,
            budget=budget,
            time_limit=time_limit,
            outcome=outcome,
            of=of,
            enqueued_as=enqueued_as,
            lease=lease,
        )
        CHILDREN[_new(declared)] = declared
        of.children.append(declared)
        return declared

    return declare


class _Common(TypedDict):
    name: str
    sentence: str
    module: str
    work: Callable[..., None]
    records: tuple[Record, ...]
    thresholds: tuple[Threshold, ...]
    steps: tuple[str, ...]
    counters: tuple[Counter, ...]


def _common(
    work: Callable[..., None],
    records: Sequence[Record],
    thresholds: Sequence[Threshold],
    steps: Sequence[str],
    counters: Sequence[Counter],
) -> _Common:
    return {
        "name": work.__name__,
        "sentence": (work.__doc__ or "").strip().split("\n")[0],
        "module": work.__module__,
        "work": work,
        "records": tuple(records),
        "thresholds": tuple(thresholds),
        "steps": tuple(f"{work.__name__}.{step}" for step in steps),
        "counters": tuple(counters),
    }


def _new(declared: Declared) -> str:
    known = spec(declared.name)
    if known is not None:
        raise DeclaredTwice(f"{declared.name} is declared twice, in {known.module} and in {declared.module}")
    return declared.name
