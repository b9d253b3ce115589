"""Delete the objects whose artifacts are gone: the outbox of batch 11.

Runs every minute.  It claims rows of the outbox, deletes their objects in bulk, and
removes the rows.  An object that a live artifact still names is left alone.  What fails
comes back later, ten times; then it is dead, and `forgekeeper objects` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import structlog

from forgekeeper.audit.intents import Intended, Item, close_earlier
from forgekeeper.batches import Record, batch
from forgekeeper.database import backlog, database, now, probe
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.chunks import START
from forgekeeper.database.stakes import Stake
from forgekeeper.database.survey import Selected, expected
from forgekeeper.database.writes import writing
from forgekeeper.preview import BUSY, PASSED_OVER, Look, Part
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import Amount
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from forgekeeper.storage.objects import OUTSIDE, Objects, StoreUnavailable, is_normal
from forgekeeper.storage.outbox import Claimed, DeletedObject
from models import JobArtifact

RECORD = "deleted_object"
CHUNK = 1_000
FIRST_RETRY = timedelta(minutes=1)
MAX_RUNTIME = timedelta(minutes=4)

Stopped = Literal["drained", "deadline", "store_unavailable", "no_store"]

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """What a run comes to; it grows with each chunk.  *remaining* is what is due afterwards."""

    deleted: int = 0
    missing: int = 0
    failed: int = 0
    remaining: int = 0
    stopped: Stopped = "drained"


@batch(
    cron="* * * * *",
    cron_sentence="When the objects of deleted artifacts are deleted.",
    pace_sentence="Objects deleted per second; unset: no limit.",
    queue="objects",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=6),
    outcome=Outcome,
    # The second says what live artifacts name.
    tables=[DeletedObject, JobArtifact],
    deletes_from="artifacts",
    records=[
        Record(
            "deleted_object",
            examined=("deleted", "missing", "failed"),
            processed=("deleted", "missing"),
            errors={"database": (), "object_storage": ("failed",)},
            objective=timedelta(hours=1),
        ),
        Record("dead_object", given_up=True),
    ],
    collector="objects",
    steps=["claimed", "deleted", "forgotten"],
    commands="forgekeeper.cli.objects",
)
def delete_objects(run: Run[Outcome]) -> None:
    """Delete the objects of destroyed artifacts.

    Raises `StoreUnavailable` when the store does not answer, `Blocked` when there is none.
    """
    try:
        with run.bad_records("deleted_object", DeletedObject.present) as bad:
            _end(run.outcome, _work_off(run, bad))
    except StoreUnavailable as error:
        log.error("object store unavailable", location=stores.ARTIFACTS, error=str(error))  # noqa: TRY400, no trace
        _end(run.outcome, "store_unavailable")
        raise
    except Blocked:
        _end(run.outcome, "no_store")
        raise


def _end(outcome: Outcome, stopped: Stopped) -> None:
    outcome.stopped, outcome.remaining = stopped, DeletedObject.due(now()).count()


def _work_off(run: Run[Outcome], bad: BadRecords) -> Literal["drained", "deadline"]:
    store = stores.at(stores.ARTIFACTS, run.settings)
    if store is None:
        raise Blocked("no_store", f"no object store {stores.ARTIFACTS!r} is configured; set FORGEKEEPER_OBJECT_STORES")
    until = time.monotonic() + run.deadline.left()
    close_earlier(run.audit, RECORD, partial(_look, store, until), name="path")
    while limit := run.brakes.free(CHUNK):
        # What was claimed is ours for so long; it is counted from before the claim.
        until = time.monotonic() + min(run.deadline.left(), run.settings.object_visibility.total_seconds())
        claimed, more = _claim(bad, run.settings, limit)
        if not more:
            return "drained"
        run.step("claimed")
        _delete(store, claimed, run, until, bad)
        if run.deadline.passed(len(claimed)):
            break
    return "deadline"


def _claim(bad: BadRecords, settings: Settings, limit: int) -> tuple[list[Claimed], bool]:
    """Claim what is due; return it, and whether there was anything at all."""
    instant, claimed = now(), list[Claimed]()

    def claim(only: Sequence[int] | None) -> int | None:
        rows = DeletedObject.claim_due(
            instant, visibility=settings.object_visibility, limit=limit, only=only, without=bad.keys
        )
        claimed.extend(rows)
        return rows[-1].id if rows else None

    reached = bad.chunk(claim, partial(DeletedObject.next_due, instant, limit=limit, without=bad.keys))
    return claimed, reached is not None


class _Chunk(NamedTuple):
    """What is ours of a claim, which of it artifacts name, and what is told of the rest."""

    rows: list[Claimed]
    named: set[str]
    told: Intended[int]


def _delete(store: Objects, claimed: list[Claimed], run: Run[Outcome], until: float, bad: BadRecords) -> None:
    chunk = _told(claimed, run)
    paths = [row.path for row in chunk.rows if row.path not in chunk.named]
    try:
        answers = store.delete(paths, until=until)
    except StoreUnavailable as error:
        if not error.began:
            run.brakes.give_back()
        _settle(chunk, {path: answer.state for path, answer in error.known.items()}, run, bad)
        raise
    run.step("deleted")
    outside = [path for path, answer in answers.items() if OUTSIDE in answer.reason]
    if outside:
        log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
    _settle(chunk, {path: answer.state for path, answer in answers.items()}, run, bad)


def _told(claimed: list[Claimed], run: Run[Outcome]) -> _Chunk:
    """Tell of the objects that are about to go: those that are ours still, that no artifact names, within limits."""
    named = JobArtifact.named([row.path for row in claimed])
    for row in claimed:
        if row.path in named:
            log.error("object kept, an artifact names it", path=row.path)
    told = Intended[int](run.audit, RECORD)
    unnamed = [row for row in claimed if row.path not in named]
    surplus = unnamed[run.brakes.reserve(len(unnamed)).records :]
    if surplus:
        DeletedObject.put_back(surplus, now())
        claimed = [row for row in claimed if row not in surplus]
    with database.atomic():
        ours = DeletedObject.still_ours(claimed)
        going = [row for row in claimed if row.id in ours and row.path not in named]
        told.begin({row.id: _item(row) for row in going})
    run.brakes.give_back(len(unnamed) - len(surplus) - len(going))
    return _Chunk([row for row in claimed if row.id in ours], named, told)


def _item(row: Claimed) -> Item:
    return Item(row.id, row.path, {"path": row.path, "project_id": row.project_id, "due": row.created_at})


def _look(store: Objects, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
    there = store.present([row["path"] for row in rows], until=until)
    return [None if row["path"] not in there else "kept" if there[row["path"]] else "deleted" for row in rows]


def _settle(chunk: _Chunk, states: dict[str, str], run: Run[Outcome], bad: BadRecords) -> None:
    """Remove the rows of what is gone, spend an attempt on what failed, give the rest back.

    What became of the objects is told in the same transactions.
    """
    outcome, rows, told = run.outcome, {row.id: row for row in chunk.rows}, chunk.told
    became = {number: states[row.path] for number, row in rows.items() if row.path in states}
    kept = {number for number, row in rows.items() if row.path in chunk.named}
    gone = [number for number in rows if number in kept or became.get(number) in ("deleted", "missing")]
    failed = [number for number, state in became.items() if state == "failed" and number not in kept]

    def forget(ids: Sequence[int]) -> None:
        went = Amount(sum(number in became for number in ids))
        with writing(), told.ending({number: became[number] for number in ids if number in became}):
            DeletedObject.forget([rows[number] for number in ids])
            run.brakes.settle(went, of=went.records)
        run.brakes.went(went, of=went.records)
        outcome.deleted += sum(became.get(number) == "deleted" for number in ids)
        outcome.missing += sum(became.get(number) == "missing" for number in ids)

    def fail(ids: Sequence[int]) -> None:
        with told.ending({number: became[number] for number in ids}):
            died = DeletedObject.fail([rows[number] for number in ids], first_retry=FIRST_RETRY)
        outcome.failed += len(ids)
        if died:
            log.error("objects given up", objects=died)

    if gone:
        bad.each(forget, gone)
    run.step("forgotten")
    if failed:
        bad.each(fail, failed)
    # The store has done what it has done, whatever stands in the way of a row.
    told.end({number: became[number] for number in told.open() if number in became})
    settled = {*gone, *failed}
    left = [number for number in rows if number not in settled]
    if left:
        bad.each(lambda ids: DeletedObject.put_back([rows[number] for number in ids], now()), left)


@delete_objects.backlog("deleted_object")
def due(now: datetime) -> Backlog:
    """Count the objects to delete."""
    return Backlog.of(DeletedObject.due(now).order_by(DeletedObject.pick_up_at), oldest=DeletedObject.pick_up_at)


@delete_objects.at_stake
def at_stake(now: datetime) -> Stake:
    """Look at the objects to delete, of these and those that artifacts name."""
    return Stake.rows(DeletedObject.due(now), of=(JobArtifact,))


@delete_objects.preview
def foreseen(look: Look) -> Iterator[Part]:
    """Count the objects that would be deleted, as far as the outbox tells: nobody asks the store for them."""
    part, store = look.part("deleted_object"), stores.at(stores.ARTIFACTS, look.settings)
    bad, position = look.passed_over("deleted_object"), START
    due = Selected(DeletedObject.due(look.now), DeletedObject.pick_up_at)
    part.keep(PASSED_OVER, due.among(bad))
    while seen := DeletedObject.seen_due(look.now, position, limit=CHUNK, without=bad):
        named = JobArtifact.named([one.object.path for one in seen])
        for row, project, busy, _place in seen:
            if reason := _stays(row.path, named, store, busy=busy):
                part.keep(reason, 1)
            else:
                part.one(str(row.id), row.path, row.claim, size=look.size, project=project)
        position = seen[-1].place
        look.told(part)
        if look.over():
            part.guess(expected(due, bad))
            break
    part.keep("fresh", backlog.count(DeletedObject.later(look.now)))
    part.keep("dead", dead())
    yield part


def _stays(path: str, named: set[str], store: Objects | None, *, busy: bool) -> str | None:
    """Say why an object stays, as `_delete` would have it; the row of one that is named goes."""
    if busy:
        return BUSY
    if path in named:
        return "named"
    if store is None:
        return "no_store"
    if not is_normal(path):
        return "invalid"
    return None if store.may_delete(path) else "outside"


@delete_objects.given_up("dead_object")
def dead() -> int:
    """Count the objects that were given up."""
    return backlog.count(DeletedObject.dead())


@delete_objects.objects
def known(location: str) -> list[str]:
    """Return where some objects should lie: of live artifacts, and of those that wait to be deleted."""
    if location != stores.ARTIFACTS:
        return []
    outbox = probe.sample("ci_deleted_objects", "id", "concat_ws('/', nullif(store_dir, ''), file)")
    return [*probe.sample("ci_job_artifacts", "id", "file_final_path"), *outbox]
