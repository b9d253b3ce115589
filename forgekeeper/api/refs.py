"""`Refs`: git refs that rows of a queue name.  `ChildPerRepository`: a child for each repository with such rows."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.answers import DEFAULT_OBJECTIVE, WHOLE_NUMBER_FIELDS, Answer, Mistake, default_record_name
from forgekeeper.platform.database import Base

Row = TypeVar("Row", bound=Base)


class ColumnKind(NamedTuple):
    """Types of columns, and their name in a sentence."""

    types: tuple[type[pw.Field[Any]], ...]
    name: str


TEXT_COLUMN = ColumnKind((pw.TextField, pw.CharField), "texts (TextField)")
NUMBER_COLUMN = ColumnKind((pw.IntegerField, *WHOLE_NUMBER_FIELDS), "whole numbers (IntegerField, BigIntegerField)")
TIME_COLUMN = ColumnKind((DateTimeTZField,), "times (DateTimeTZField)")


@dataclass(frozen=True)
class StatusQueue(Generic[Row]):
    """Rows of *model* as items of work until their *status* says that they are done.

    *pending*, *processed* and *rejected* are the numbers of the states.  A row that cannot be worked on is rejected
    with a *reason* and waits in quarantine for a person.  *created_at* is when the work was asked for; the engine sets
    *updated_at* with each change of the status, and *processed_at* when the work is done.  Housekeeping
    deletes processed rows after *keep_processed*; None keeps them.

    Raises `Mistake` for columns of another type or table.

    >>> branches = StatusQueue(
    ...     Branch,
    ...     status=Branch.state,
    ...     pending=0,
    ...     processed=1,
    ...     rejected=2,
    ...     reason=Branch.reason,
    ...     created_at=Branch.created_at,
    ...     updated_at=Branch.updated_at,
    ...     processed_at=Branch.deleted_at,
    ... )
    """

    model: type[Row]
    _: KW_ONLY
    status: pw.Field[Any]
    pending: int
    processed: int
    rejected: int
    reason: pw.Field[Any]
    created_at: pw.Field[Any]
    updated_at: pw.Field[Any]
    processed_at: pw.Field[Any]
    keep_processed: timedelta | None = None

    def __post_init__(self) -> None:
        """Refuse columns that cannot be set."""
        name = f"StatusQueue of {self.model.__name__}"
        kinds = {
            "status": NUMBER_COLUMN,
            "reason": TEXT_COLUMN,
            "created_at": TIME_COLUMN,
            "updated_at": TIME_COLUMN,
            "processed_at": TIME_COLUMN,
        }
        for option, kind in kinds.items():
            nullable = option in ("reason", "processed_at")
            _require_column(f"{name}: {option}", getattr(self, option), self.model, kind, nullable=nullable)
        if not isinstance(self.model._meta.primary_key, WHOLE_NUMBER_FIELDS):
            raise Mistake(f"{name}: its primary key has to be one column of whole numbers")
        if len({self.pending, self.processed, self.rejected}) < 3:
            raise Mistake(f"{name}: pending, processed and rejected have to be different numbers")


@dataclass(frozen=True)
class Refs(Answer, Generic[Row]):
    """Git refs of one repository, one for each pending row of the queue *source*: the answer of a child.

    *of* is the id of the child's project, its first argument.  *missing* is the second: the batch tells it that
    the repository does not exist, and then the rows are closed without git.  *project* is the column with the
    project's id, *ref* the column with the full name (``refs/…``), *expected* the column with the object id that the
    ref must have.  If a row expects none, the first look writes into it the id that the ref has.  *repository* is a
    column of another table, whose primary key is the project's id: the path of a bare repository below the setting
    ``FORGEKEEPER_REPOSITORIES_ROOT``.

    All refs are deleted in one git transaction, then their rows are closed: a crash in between repeats a harmless
    deletion.  The child holds a lease of the project, which is the claim of all its rows.  After *most* rows it ends,
    and starts a successor if more are pending.  A ref that is not under ``refs/``, that has moved, or that is the
    default branch stays, and its row is rejected.  People exclude refs by project and by name.  `check` asks for an
    index on the project and the key, of the pending rows alone: with it a page of rows is one index scan.

    A row may wait for *objective*.  *called* names a ref in quarantine and in `audit`, *record* in metrics and audit;
    the default of both is the model's name.

    Raises `Mistake` for columns of another type or table.

    >>> def find_branches(queue: StatusQueue[Branch], project_id: int, missing: bool) -> Refs[Branch]:
    ...     return Refs(
    ...         queue,
    ...         of=project_id,
    ...         missing=missing,
    ...         project=Branch.project_id,
    ...         ref=Branch.ref,
    ...         expected=Branch.expected,
    ...         repository=Project.path,
    ...     )
    """

    source: StatusQueue[Row]
    _: KW_ONLY
    of: int
    missing: bool
    project: pw.Field[Any]
    ref: pw.Field[Any]
    expected: pw.Field[Any]
    repository: pw.Field[Any]
    most: int = 10_000
    objective: timedelta = DEFAULT_OBJECTIVE
    called: str = ""
    record: str = ""

    def __post_init__(self) -> None:
        """Refuse columns that no ref can be found by."""
        model = self.source.model
        name = f"Refs of {model.__name__}"
        _require_column(f"{name}: project", self.project, model, NUMBER_COLUMN)
        _require_column(f"{name}: ref", self.ref, model, TEXT_COLUMN)
        _require_column(f"{name}: expected", self.expected, model, TEXT_COLUMN, nullable=True)
        owner = self.repository.model if isinstance(self.repository, TEXT_COLUMN.types) else model
        if owner is model or not isinstance(owner._meta.primary_key, WHOLE_NUMBER_FIELDS):
            raise Mistake(
                f"{name}: repository has to be a column for texts (TextField) of the table of projects, whose primary"
                " key is the project's id, as Project.disk_path may be"
            )
        if self.most < 1:
            raise Mistake(f"{name}: a child works on at least one row, not {self.most}")
        record = self.record or default_record_name(model)
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "called", self.called or record)

    @property
    def project_table(self) -> type[Base]:
        """The table of the projects."""
        model: type[Base] = self.repository.model
        return model

    @property
    def record_without_repository(self) -> str:
        """The name in metrics and previews of a row that is closed because its repository does not exist."""
        return f"gone_{self.called}_deletion"

    @property
    def rejected_record(self) -> str:
        """The name in metrics of a rejected row."""
        return f"rejected_{self.called}"

    @property
    def processed_record(self) -> str:
        """The name in metrics and audit of a processed row that housekeeping deletes."""
        return f"{self.called}_deletion"


@dataclass(frozen=True)
class ChildPerRepository(Answer):
    """A message to the batch's child with `Refs`, for each project that has pending rows.

    Projects are walked *page* at a time, at most *most* in a run.  The next run continues after the last project of
    this one, and wraps, so that no project starves.  A project whose child is on its way gets no second child.

    Missing repositories come last, once the run has seen all projects: their rows are closed only if few enough are
    missing (``FORGEKEEPER_MISSING_REPOSITORIES``).  Else the run fails with `RepositoriesMissing`.  Without the
    sentinel of the repositories' root it fails before any child is sent.

    >>> @batch(cron="*/5 * * * *", budget=timedelta(minutes=4))
    ... def merged_branches(now: datetime) -> ChildPerRepository:
    ...     \"\"\"Delete branches that have been merged, a child for each repository.\"\"\"
    ...     return ChildPerRepository(page=100, most=10_000)
    """

    _: KW_ONLY
    page: int = 100
    most: int = 10_000

    def __post_init__(self) -> None:
        """Refuse pages and runs without projects."""
        if self.page < 1 or self.most < 1:
            raise Mistake(f"ChildPerRepository: page and most have to be at least 1, not {self.page} and {self.most}")


def _require_column(
    option: str, column: object, model: type[Base], kind: ColumnKind, *, nullable: bool = False
) -> None:
    """Raise `Mistake` unless *column* is a column of *model* of that kind, and may be NULL if that is needed."""
    if not isinstance(column, kind.types) or column.model is not model:
        raise Mistake(f"{option} has to be a column of {model.__name__} for {kind.name}")
    if nullable and not column.null:
        raise Mistake(f"{option} has to be a column that may be NULL: write null=True")
