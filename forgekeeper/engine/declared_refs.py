"""The declarations that follow from `Refs` and `ChildPerRepository`: results, records, backlog, preview, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from forgekeeper.api.answers import Answer, DueFunction, Mistake, Subject, default_record_name
from forgekeeper.api.batches import ChildSpec, Declaration
from forgekeeper.api.records import Record
from forgekeeper.api.refs import ChildPerRepository, Refs
from forgekeeper.engine.deletion_loop import MAX_DELETES_REASON
from forgekeeper.engine.ref_preview import preview_refs
from forgekeeper.engine.ref_queue_inspection import (
    count_pending_refs,
    define_ref_quarantine,
    measure_affected_refs,
    select_pending_rows,
    select_processed_rows,
)
from forgekeeper.engine.ref_restoring import count_recoverable_refs, list_children_with_refs
from forgekeeper.engine.repository_children import ENQUEUED_FIELD, TOTAL_FIELD
from forgekeeper.platform.database import Base, now
from forgekeeper.platform.database.naming import quote_name, relation_name
from forgekeeper.platform.database.relations import INDEX_PATTERN, index_statements
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.status_queue import RefQueue
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.stale_locks import count_stale_locks
from metrics.catalogue import Counter, Gauge, Reading

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAMPLE_PROJECT_ID = 1
"""The project that a child is asked for to get the shape of its answer."""
MAX_LOCK_CHECKED_REPOSITORIES = 200
"""Maximum repositories of a batch that are checked for stale locks: the first with pending rows."""
STALE_LOCK_AGE = timedelta(minutes=20)
"""A lock this old was left behind by a killed git, and no ref can be deleted: a deletion ends after ten minutes."""
STALE_LOCKS_GAUGE = Gauge(
    "git_stale_locks",
    "Repositories with pending ref deletions whose packed-refs.lock is older than the time limit of a deletion.",
)
FAN_OUT_COUNTERS = (
    Counter("fanout_limit_reached", "Fan-outs cut off at their limit (MAX_PROJECTS).", stopped="max_projects"),
    Counter(
        "missing_repositories",
        "Projects with pending deletions and without a repository; each run counts them again.",
        ("missing_repositories",),
    ),
)
FAN_OUT_FIELDS = (TOTAL_FIELD, ENQUEUED_FIELD, "deduplicated"), ("missing_repositories",)
"""Fields of a batch's result before and after `stopped`.  TOTAL are the projects with a child on its way."""
CHILD_FIELDS = ("total_deletes", "rejected"), ("gone",)
"""The same for its child: rows whose refs are deleted, rejected rows, rows closed without a repository."""


def check_declaration(declared: Declaration, answers: Sequence[Answer]) -> None:
    """Raise `Mistake` for a batch that answers with `Refs`, and a child that answers with `ChildPerRepository`."""
    name, is_child = declared.name, isinstance(declared, ChildSpec)
    if is_child and any(isinstance(answer, ChildPerRepository) for answer in answers):
        raise Mistake(f"{name} is a child and returns ChildPerRepository: return it from its batch")
    if not is_child and any(isinstance(answer, Refs) for answer in answers):
        raise Mistake(
            f"{name} is a batch and returns Refs, which belong to one project: return ChildPerRepository, and return"
            f" Refs from a function with @child({name}, …)"
        )


def require_ref_arguments(name: str, refs: Refs[Any], ask_missing: Callable[[], object]) -> None:
    """Raise `Mistake` unless a child's *refs* follow from its arguments.

    The project has to be the first argument, and refs are missing if the second argument says so.  *ask_missing* asks
    the child for the same project, as if the batch had found no repository of it.
    """
    missing_answer = None
    with suppress(TypeError):
        missing_answer = ask_missing()
    if (
        (refs.of, refs.missing) != (SAMPLE_PROJECT_ID, False)
        or not isinstance(missing_answer, Refs)
        or not missing_answer.missing
    ):
        raise Mistake(
            f"{name} returns Refs: declare its arguments as now, project_id: int, missing: bool = False, and return"
            " Refs(…, of=project_id, missing=missing)"
        )


def make_result(name: str, answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run or child."""
    is_child = any(isinstance(answer, Refs) for answer in answers)
    before, after = CHILD_FIELDS if is_child else FAN_OUT_FIELDS
    fields: list[tuple[str, type, Any]] = [(one, int, field(default=0)) for one in before]
    fields.append(("stopped", str, field(default="drained")))
    fields += [(one, int, field(default=0)) for one in after]
    return make_dataclass("RefResult", fields, namespace={"__doc__": f"Result of {name}."})


def list_records(answers: Sequence[Answer]) -> Iterator[Record]:
    """Yield how the fields of that result are counted."""
    for answer in answers:
        if isinstance(answer, ChildPerRepository):
            yield Record("project", examined=(TOTAL_FIELD,))
        elif isinstance(answer, Refs):
            yield Record(
                answer.record,
                examined=("total_deletes", "rejected", "gone"),
                processed=("total_deletes",),
                errors={"database": (), "gitaly": ("rejected",)},
                objective=answer.objective,
                excluded_by=("project", "pattern"),
            )
            yield Record(answer.record_without_repository, processed=("gone",))
            yield Record(answer.rejected_record, refused=True)


def complete_declaration(declared: Declaration, answers: Sequence[Answer], _due: DueFunction) -> None:
    """Complete the declaration of a batch that fans out to repositories, or of its child and with it the batch."""
    for answer in answers:
        if isinstance(answer, ChildPerRepository):
            declared.counters = (*FAN_OUT_COUNTERS, *declared.counters)
        elif isinstance(answer, Refs) and isinstance(declared, ChildSpec):
            _complete_child(declared, answer)
            _complete_batch(declared, answer)


def _complete_child(child: ChildSpec, refs: Refs[Any]) -> None:
    """Add lease, backlog, quarantine and preview, all from the queue that the child reads."""
    batch = child.batch.name
    child.refs, child.lease, child.enqueued_as = refs, True, ENQUEUED_FIELD
    # At the deadline it leaves no successor: the next run of the batch sends it again.
    child.continues = (MAX_DELETES_REASON,)
    child.add_backlog(refs.record)(partial(count_pending_refs, refs, batch))
    child.add_quarantine(define_ref_quarantine(refs, batch))
    child.add_shown_rows(partial(select_pending_rows, refs))
    child.add_preview(partial(preview_refs, refs))


def _complete_batch(child: ChildSpec, refs: Refs[Any]) -> None:
    """Add the tables, the place and the undo of the child's refs to its batch."""
    batch, queue = child.batch, refs.source
    batch.tables = tuple(dict.fromkeys((queue.model, refs.project_table, *batch.tables)))
    batch.deletes_from = batch.deletes_from or "repositories"
    _declare_grants(refs)
    _expect_index(refs)
    batch.at_stake(partial(measure_affected_refs, refs, batch.name))
    batch.add_collector("git_locks", gauges=[STALE_LOCKS_GAUGE])(read_stale_locks)
    batch.add_known_repositories(RefQueue(refs, batch.name).sample_paths)
    batch.add_subject(_make_ref_subject(child, refs))
    if queue.keep_processed is not None:
        batch.old_records(partial(select_processed_rows, refs))


def _declare_grants(refs: Refs[Any]) -> None:
    """Declare the grants that the statements need, unless the models declare their own."""
    queue = refs.source
    changed = (queue.status, queue.reason, refs.expected, queue.updated_at, queue.processed_at)
    names = ", ".join(column.column_name for column in changed)
    if queue.model.grants == Base.grants:
        queue.model.grants = f"worker: select, update ({names}), delete; exporter: select"
    if refs.project_table.grants == Base.grants:
        refs.project_table.grants = "worker: select; exporter: select"


def _expect_index(refs: Refs[Any]) -> None:
    """Declare the index for pages of a project's pending rows, unless the model has one.

    With the index a page is one scan.
    """
    model, queue = refs.source.model, refs.source
    columns = (found[1].replace('"', "") for found in map(INDEX_PATTERN.fullmatch, index_statements(model)) if found)
    if not any(names.split(", ")[0] == refs.project.column_name for names in columns):
        project, key, status = (
            quote_name(one.column_name) for one in (refs.project, model._meta.primary_key, queue.status)
        )
        on = f"{relation_name(model)} ({project}, {key}) where {status} = {int(queue.pending)}"
        model.indexed(f"{default_record_name(model)}_pending on {on}")


def _make_ref_subject(child: ChildSpec, refs: Refs[Any]) -> Subject:
    return Subject(
        refs.called,
        "PROJECT:REF",
        refs.record,
        name="ref",
        within="project_id",
        because="its project requested the deletion at {due}",
        restore="forgekeeper refs restore {id}",
        restore_run="forgekeeper refs restore --run {run}",
        undone="refs can be restored until `git gc` deletes their objects, by default after two weeks",
        count_recoverable=partial(count_recoverable_refs, child),
    )


def read_stale_locks(settings: Settings) -> Iterator[Reading]:
    """Yield the number of stale locks in repositories of all batches; nothing if the root cannot be read."""
    root, before, paths = settings.repositories_root, now() - STALE_LOCK_AGE, list[str]()
    for child in list_children_with_refs() if root else ():
        assert child.refs is not None, "list_children_with_refs checks that"
        queue = RefQueue(child.refs, child.batch.name)
        paths += queue.read_paths(queue.find_waiting_projects(after=0, limit=MAX_LOCK_CHECKED_REPOSITORIES)).values()
    with suppress(RootUnavailable):
        yield Reading("git_stale_locks", 0 if root is None else count_stale_locks(root, paths, before=before))
