"""Execution of answers: sends children, and calls the loop of each other answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import structlog

from forgekeeper.api.answers import (
    Answer,
    Changes,
    Children,
    KeyedArguments,
    Mistake,
    Note,
    Rows,
    Skip,
    ask_for_rows,
)
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.objects import Objects, Register
from forgekeeper.api.refs import ChildPerRepository, Refs
from forgekeeper.engine import rows
from forgekeeper.engine.buckets import ask_in_buckets
from forgekeeper.engine.deletion_loop import delete_items
from forgekeeper.engine.housekeeping import remove_old_records
from forgekeeper.engine.queue_source import QueueSource
from forgekeeper.engine.register_source import RegisterSource
from forgekeeper.engine.repository_children import plan_repository_children
from forgekeeper.engine.run import Run
from forgekeeper.engine.status_queue_source import StatusQueueSource
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import LeaseTaken
from forgekeeper.platform.database import exclusions
from forgekeeper.platform.database.sessions import engine_step
from forgekeeper.platform.settings import Settings

CHILDREN_PER_PAGE = 100
"""Children sent per page."""
_run: ContextVar[Run[Any]] = ContextVar("run")
_settings: ContextVar[Settings] = ContextVar("settings")


def settings() -> Settings:
    """Return the settings of this process.

    When a batch is declared, its function is called with the defaults of all settings: the shape of its answer must
    not depend on them.

    >>> grace = settings().object_grace
    """
    run = _run.get(None)
    return _settings.get(None) or (run.settings if run else client.settings) or Settings.model_construct()


@contextmanager
def use_settings(chosen: Settings) -> Iterator[None]:
    """Let `settings` return these within the block."""
    token = _settings.set(chosen)
    try:
        yield
    finally:
        _settings.reset(token)


def fan_out_children(run: Run[Any], children: Children) -> str | None:
    """Send the children that are not on their way; return why that ended early, or None."""
    calls = iter(children.iterate_calls())
    while page := list(islice(calls, CHILDREN_PER_PAGE)):
        with engine_step():
            allowed = _not_excluded(run, page) if children.by_project else page
            sent = run.fan_out(children.child, allowed, per_message=children.per_message)
        run.add_to_result(children.sent, sent.enqueued)
        run.add_to_result("deduplicated", sent.deduplicated)
        if children.all_of is not None:
            run.add_to_result(children.all_of, sent.enqueued + sent.deduplicated)
        run.reach_failpoint("enqueued")
        if sent.queue_full:
            return "queue_full"
        if run.deadline.has_passed():
            return "deadline"
    return None


def _not_excluded(run: Run[Any], page: Sequence[KeyedArguments]) -> list[KeyedArguments]:
    excluded = exclusions.find_excluded(
        run.declared.batch.name, lambda: [(arguments[0], None) for _, arguments in page]
    )
    return [one for place, one in enumerate(page) if place not in excluded]


def execute_answers(ask: Callable[..., Any], run: Run[Any], *ids: Any) -> None:
    """Ask the batch for the records to delete now, and execute its answers.

    The outcome has the results.  A generator is asked step by step, and closed in any case.  A child does nothing while
    another has its lease.
    """
    token = _run.set(run)
    try:
        stopped = _execute_under_lease(run, ask, *ids)
        if stopped is not None and hasattr(run.outcome, "stopped"):
            run.outcome.stopped = stopped
        run.has_more_work = stopped in run.declared.continues
    finally:
        _run.reset(token)
        if run.declared.logged_as is not None:
            structlog.contextvars.bind_contextvars(**{run.declared.logged_as: asdict(run.outcome)})


def _execute_under_lease(run: Run[Any], ask: Callable[..., Any], *ids: Any) -> str | None:
    try:
        # The first id of a child names its lease; the end of the message releases it.
        run.lease = run.shared.find_lease(ids[0]) if run.shared and run.declared.lease else None
        answers = partial(_ask_for_answers, run, ask, *ids)
        answer = answers() if run.declared.batch.buckets is None else ask_in_buckets(run, answers)
        with closing(answer) if isinstance(answer, Generator) else nullcontext():
            return _execute_all(run, iter(answer))
    except LeaseTaken:
        return "lease_held"


def _ask_for_answers(run: Run[Any], ask: Callable[..., Any], *ids: Any) -> Iterable[object]:
    """Ask the function; return its answers."""
    answer = ask(run.now, *ids)
    return answer if isinstance(answer, Iterable) and not isinstance(answer, (Answer, str)) else [answer]


def _execute_all(run: Run[Any], answers: Iterator[object]) -> str | None:
    """Execute the answers one by one; return why the run stopped.

    The return value of a generator is such a reason.
    """
    begun = False
    while True:
        try:
            answer = next(answers)
        except StopIteration as end:
            said: str | None = end.value
            return said
        stopped = "deadline" if begun and run.deadline.is_halted() else _execute_answer(run, answer)
        if stopped is not None or run.skipped is not None:
            return stopped
        begun = begun or not isinstance(answer, Note)


def _execute_answer(run: Run[Any], answer: object) -> str | None:
    """Execute one answer; return why the run has to end, None if it may continue."""
    match answer:
        case Changes():
            return rows.change_due(run, answer.bind(run.declared.batch.name, run.now))
        case Rows():
            return rows.delete_due(run, _limit_to_batch_rows(run, answer.bind(run.declared.batch.name, run.now)))
        case Objects() | Refs():
            return _delete_named_items(run, answer)
        case Housekeeping():
            return remove_old_records(run, answer)
        case Children() | ChildPerRepository():
            return fan_out_children(run, answer) if isinstance(answer, Children) else _send_per_repository(run, answer)
        case Skip():
            run.skipped = answer.reason
        case Note():
            run.set_result_fields(answer.fields)
        case _:
            raise Mistake(f"{run.batch} returned {answer!r}: return Rows, Objects, Refs, Children or Skip")
    return None


def _delete_named_items(run: Run[Any], answer: Objects[Any] | Refs[Any]) -> str | None:
    """Delete the answer's objects or refs; return why the run has to end, None if all are deleted."""
    source: QueueSource | RegisterSource | StatusQueueSource
    if isinstance(answer, Refs):
        source = StatusQueueSource(answer, run)
    else:
        source = (RegisterSource if isinstance(answer.source, Register) else QueueSource)(answer, run)
    return delete_items(run, source, source.target)


def _send_per_repository(run: Run[Any], answer: ChildPerRepository) -> str | None:
    """Send a child for each repository; return why the run has to end, None if all are sent."""
    with closing(plan_repository_children(run, answer)) as answers:
        return _execute_all(run, answers)


def _limit_to_batch_rows(run: Run[Any], rows: Rows[Any]) -> Rows[Any]:
    """Return the child's rows that are also due to all children together.

    Other rows were neither counted nor previewed.
    """
    if run.declared.due_of_all_children is None:
        return rows
    for whole in ask_for_rows(run.declared.batch.name, run.declared.due_of_all_children, run.now):
        if (whole.record, whole.model) == (rows.record, rows.model):
            return rows.restrict_to(whole)
    raise Mistake(f"{run.batch} returned {rows.record}, but its due= returns no Rows of that record")
