"""What a batch declares, and the registry of all that have been declared.

A document's module declares its batch with `@batch` and its children with `@child`.  All else is derived from
that: the actor and its time limit, the settings ``CRON_…``, ``CATCH_UP_…`` and ``PACE_…``, label sets and zero
series, counting, what the exporter asks, `status`, failpoints, dashboards, documentation.  Declaring does nothing:
`forgekeeper.process.boot` makes actors of what has been declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypedDict, TypeVar

from dramatiq import Actor, Broker, Message

from forgekeeper.audit.subjects import Subject
from forgekeeper.brought import Brought
from forgekeeper.database import Base
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.stakes import AtStake
from forgekeeper.declaring.answers import Answer
from forgekeeper.declaring.deriving import Due, Shape, refuse_run, rows_of, shape_of
from forgekeeper.declaring.items import Items
from forgekeeper.declaring.rows import Rows
from forgekeeper.deleting import looking
from forgekeeper.flags import FLAGS
from forgekeeper.preview import Look, Part
from forgekeeper.settings import Place
from forgekeeper.shown import Shown
from metrics.catalogue.metric import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from forgekeeper.runs.run import Run

Outcome = TypeVar("Outcome", bound="DataclassInstance")
Ids = ParamSpec("Ids")
Asked: TypeAlias = "Callable[[datetime], Answer | Iterable[Answer]]"
"""What a batch is: it says what goes at an instant."""
ChildAsked: TypeAlias = "Callable[Concatenate[datetime, Ids], Answer | Iterable[Answer]]"
Old = TypeVar("Old", bound="Callable[[datetime], Rows[Any]]")
Fields = tuple[str, ...]
"""Fields of an outcome, added up."""
MARGIN = timedelta(minutes=1)
"""So long after its budget a run is killed, unless its declaration says another time."""


class DeclaredTwice(Exception):
    """Two batches or children have one name; the message says which, and where they are."""


class NotSent(Exception):
    """No run of the batch may start now; the message says why."""


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
    as they fail.  *objective* is how long a due record may wait; *backlog* says that due ones are counted
    though they have none; *refused*, that they lie in quarantine.  *bytes* are the fields that add their sizes up.
    """

    name: str
    examined: Fields = ()
    processed: Fields = ()
    errors: Mapping[str, Fields] = field(default_factory=dict)
    objective: timedelta | None = None
    backlog: bool = False
    refused: bool = False
    bytes: Fields = ()

    @property
    def quarantined(self) -> bool:
        """Whether some may lie in quarantine: bad ones, or those that were refused."""
        return self.refused or bool({"database", "state_transition"} & self.errors.keys())


class Schedule(NamedTuple):
    """The defaults of a batch's own settings, and the sentences that document them."""

    cron: str
    cron_sentence: str
    pace_sentence: str


@dataclass(kw_only=True, eq=False)
class Declared(Shown, Actor[..., None]):
    """What batches and children have in common: each is an actor, once the process has a broker."""

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
    whole: Due | None = None
    continues: Fields = ()
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
        raise NotImplementedError

    @property
    def parent(self) -> str | None:
        """The name of the batch of which this is a child, None of a batch."""
        return None

    @property
    def reads_only(self) -> bool:
        """Whether its session may only read: the engine deletes what it answers with."""
        return self.batch.writes is None

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
class BatchSpec(Declared, Brought):
    """The declaration of a batch; its row in the database is `forgekeeper.runs.batch.Batch`."""

    schedule: Schedule
    flag: str | None
    tables: tuple[type[Base], ...]
    deletes_from: Place | None
    misreadings: Callable[[], Sequence[str]]
    writes: str | None = None
    sender: Callable[[BatchSpec], Message[None]] | None = None
    stakes: list[AtStake] = field(default_factory=list)
    children: list[ChildSpec] = field(default_factory=list)

    @property
    def batch(self) -> BatchSpec:
        """The batch itself."""
        return self

    def send_with_options(self, *, args: tuple[()] = (), **options: Any) -> Message[None]:
        """Send a run by hand, through the ledger, or again the one that is open; return its message.

        A run takes no arguments, options or delay: raises `TypeError` for any, `NotSent` where no run may start, and
        `RuntimeError` in a process that has no broker.
        """
        if args or any(options.values()):
            raise TypeError(f"{self.name} is a batch: send() takes nothing, as the ledger has one run of it at a time")
        if self.sender is None:
            raise RuntimeError(f"{self.name} cannot be sent before forgekeeper.process.boot.load_batches()")
        return self.sender(self)

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


@dataclass(kw_only=True, eq=False)
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
    cron: str,
    budget: timedelta,
    document: int | None = None,
    cron_sentence: str = "",
    pace_sentence: str = "",
    time_limit: timedelta | None = None,
    outcome: type[DataclassInstance] | None = None,
    team: str = "operations",
    queue: str = "cron",
    due: Due | None = None,
    writes: str | None = None,
    records: Sequence[Record] | None = None,
    thresholds: Sequence[Threshold] = (),
    steps: Sequence[str] = (),
    counters: Sequence[Counter] = (),
    collector: str | None = None,
    flag: str | None = None,
    flags: Mapping[str, str] | None = None,
    tables: Sequence[type[Base]] = (),
    deletes_from: Place | None = None,
    misreadings: Callable[[], Sequence[str]] = tuple,
    logged_as: str | None = None,
    commands: str | None = None,
) -> Callable[[Asked], BatchSpec]:
    """Declare a batch: a function of the time that returns what goes now; its first sentence says what it does.

    It returns `Rows`, `Items`, `Children` or `Skip`, several `Rows` as a list, or yields them.  PostgreSQL's time is
    asked once a run.  From the answer follow the run, the preview, the backlog, what the breaker weighs, limits, pace,
    stop, audit, counters and settings.  The function only looks: a run's session cannot write.  *writes* says why a
    batch has to write by itself all the same: then nothing of that is kept for what it writes, and `check` says so.

    *cron* has five fields, or six with seconds first; the setting ``CRON_…`` replaces it.  *budget* is how long a run
    may take before it stops by itself; after *time_limit*, a minute more, it is killed.  *due* says what is due where
    the function cannot be asked before a run.  *outcome* is a dataclass for the result, *records* say which of its
    fields count what: both follow from `Rows` and `Items`.  Of *tables* it is asked before each run whether its
    statements would misread them; *misreadings* may say more.  *flags* are those that it reads, each with what it
    switches; by *flag* it is switched off.  *collector* is the exporter's label for who reads its backlogs, if it is
    not the batch's name.
    *logged_as* is what the last line of a run calls the whole result, besides its fields.
    *commands* is a module, imported by the command line alone, whose `COMMANDS` maps names to commands or groups.

    Raises `Mistake` for an answer that cannot be worked on, `DeclaredTwice`.
    """

    def declare(function: Asked) -> BatchSpec:
        shape = _shape(function, due, records, writes)
        declared = BatchSpec(
            **_common(
                function,
                shape,
                records=records,
                outcome=outcome,
                thresholds=thresholds,
                steps=steps,
                counters=counters,
            ),
            collected_as=collector or function.__name__,
            document=document,
            queue=queue,
            team=team,
            budget=budget,
            time_limit=time_limit or budget + MARGIN,
            schedule=Schedule(
                cron,
                cron_sentence or f"When {function.__name__} runs.",
                pace_sentence or f"Records that {function.__name__} deletes per second at most; unset: no limit.",
            ),
            flag=flag,
            flags=flags or {},
            tables=(*tables, *(one for one in shape.tables if one not in tables)),
            deletes_from=deletes_from,
            misreadings=misreadings,
            commands=commands,
            logged_as=logged_as,
            writes=writes,
        )
        BATCHES[_new(declared)] = declared
        FLAGS.update(declared.flags)
        _derive(declared, shape, due or function)
        return declared

    return declare


def child(
    of: BatchSpec,
    *,
    queue: str,
    budget: timedelta,
    enqueued_as: str = "children_enqueued",
    time_limit: timedelta | None = None,
    outcome: type[DataclassInstance] | None = None,
    due: Due | None = None,
    continues: Sequence[str] = ("deadline",),
    records: Sequence[Record] | None = None,
    thresholds: Sequence[Threshold] = (),
    steps: Sequence[str] = (),
    counters: Sequence[Counter] = (),
    collector: str | None = None,
    lease: bool = False,
) -> Callable[[ChildAsked[Ids]], ChildSpec]:
    """Declare the child of a batch's fan-out: a function of the time and of ids that returns what goes now.

    It answers as a batch does, and running it twice is harmless.  *due* says what is due to all children together:
    of what a child answers with, only what is among that goes.  It starts its successor when it has stopped for a
    reason among *continues*.  *enqueued_as* is the field of its parent's result that counts those sent.
    """

    def declare(function: ChildAsked[Ids]) -> ChildSpec:
        shape = _shape(function, due, records)
        declared = ChildSpec(
            **_common(
                function,
                shape,
                records=records,
                outcome=outcome,
                thresholds=thresholds,
                steps=steps,
                counters=counters,
            ),
            collected_as=collector or function.__name__,
            document=of.document,
            queue=queue,
            team=of.team,
            budget=budget,
            time_limit=time_limit or budget + MARGIN,
            of=of,
            enqueued_as=enqueued_as,
            lease=lease,
            whole=due,
            continues=tuple(continues),
        )
        CHILDREN[_new(declared)] = declared
        of.children.append(declared)
        _derive(declared, shape, due or function)
        return declared

    return declare


class _Common(TypedDict):
    name: str
    sentence: str
    module: str
    work: Callable[..., None]
    outcome: type[DataclassInstance]
    records: tuple[Record, ...]
    thresholds: tuple[Threshold, ...]
    steps: tuple[str, ...]
    counters: tuple[Counter, ...]


def _shape(
    function: Callable[..., Any], due: Due | None, records: Sequence[Record] | None, writes: str | None = None
) -> Shape:
    """Ask for the shape of what goes, unless the document has declared its records; one that writes is not asked."""
    refuse_run(function)
    if due is not None or (records is None and writes is None):
        return shape_of(function.__name__, due or function)
    return Shape()


def _common(
    function: Callable[..., Any],
    shape: Shape,
    *,
    records: Sequence[Record] | None,
    outcome: type[DataclassInstance] | None,
    thresholds: Sequence[Threshold],
    steps: Sequence[str],
    counters: Sequence[Counter],
) -> _Common:
    name = function.__name__
    # What deletes no rows may send children.
    own = steps or (() if shape.rows or shape.items else ["enqueued"])
    return {
        "name": name,
        "sentence": (function.__doc__ or "").strip().split("\n")[0],
        "module": function.__module__,
        "work": partial(_work, function),
        "outcome": outcome or shape.outcome(name),
        "records": (*map(_record, shape.rows), *map(_items, shape.items)) if records is None else tuple(records),
        "thresholds": tuple(thresholds),
        "steps": tuple(f"{name}.{step}" for step in dict.fromkeys((*shape.steps, *own))),
        "counters": tuple(counters),
    }


def _work(function: Callable[..., Any], run: Run[Any], *ids: Any) -> None:
    # The loop knows of runs, which know of declarations.
    from forgekeeper.deleting.work import work

    work(run, function, *ids)


def _record(rows: Rows[Any]) -> Record:
    """Say how rows are counted."""
    size = () if rows.counted_bytes is None else (rows.counted_bytes,)
    counted = (rows.counted,)
    return Record(rows.record, counted, counted, {"database": ()}, objective=rows.objective, bytes=size)


def _items(items: Items[Any]) -> Record:
    """Say how items are counted."""
    errors = {"database": ()} if items.keyed else {}
    return Record(items.record, (*items.processed, *items.failed), items.processed, errors, objective=items.objective)


def _derive(declared: Declared, shape: Shape, due: Due) -> None:
    """Let everybody who asks about the records be answered by what the run deletes by."""
    for rows in shape.rows:
        record = rows.record
        if rows.objective is not None:
            declared.backlog(record)(partial(_backlog, declared, due, record))
        declared.batch.audited(rows.called or Subject(record, "ID", record, because="it was due at {due}"))
    if shape.rows:
        declared.preview(lambda look: _previewed(declared, due, look))
    if any(rows.objective for rows in shape.rows):
        declared.batch.at_stake(lambda now: looking.stake(*rows_of(declared.name, due, now)))


def _backlog(declared: Declared, due: Due, record: str, now: datetime) -> Backlog:
    return looking.backlog(next(rows for rows in rows_of(declared.name, due, now) if rows.record == record))


def _previewed(declared: Declared, due: Due, look: Look) -> Iterator[Part]:
    all_rows = list(rows_of(declared.name, due, look.now))
    for number, rows in enumerate(all_rows):
        yield from looking.preview(rows, look.within_share(1 / (len(all_rows) - number)))


def _new(declared: Declared) -> str:
    known = spec(declared.name)
    if known is not None:
        raise DeclaredTwice(f"{declared.name} is declared twice, in {known.module} and in {declared.module}")
    return declared.name
