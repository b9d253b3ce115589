"""`migrate`: create and change forgekeeper's own tables."""

from __future__ import annotations

import time
from typing import Annotated

import peewee as pw
import redis
import typer

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.audit import acts, partitions
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Deletion
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.holding import FIRST_MIGRATION, find_added_batches, hold_new_batches, list_deleting_batches
from forgekeeper.cli.terminal import FAILED_STATUS, Json, Problem, err, print_answer
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.notices import Notice
from forgekeeper.ledger.operator_events import OperatorEvent
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform import installation, migrations
from forgekeeper.platform.database import Base, database, sqlstate
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.platform.installation import Installation, InstallationMismatch, require_same_installation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from metrics.logs import clean_text, text_of

OWN_TABLES: tuple[type[Base], ...] = (
    *(FeatureFlag, Batch, Hold, Exclusion, JobRun, DeletedObject, Process, Installation),
    *(Quarantined, Notice, OperatorEvent, SettledUpload, RunTotal, Act, Deletion),
)
"""Forgekeeper's own tables: it migrates them, and no other program writes to them."""
MISSING_RIGHT_SQLSTATE = "42501"
UP_TO_DATE_SENTENCE = "the schema is up to date"
RUN_AS_OWNER_SENTENCE = (
    "{}: nothing was changed; run `forgekeeper migrate` as the role that owns forgekeeper's tables, or, if their"
    " schema does not exist yet, let a superuser run `create schema {} authorization ROLE` (docs/security.md)"
)
TOO_OLD_SENTENCE = (
    "nothing was changed: processes of an older version would fail on the new tables: {}; stop them, or let"
    " `forgekeeper migrate --wait` wait until they have ended"
)
PROCESSES_MIGRATION = "0007_processes"
"""Migration that creates the table of processes."""
POLL_SECONDS = 0.5
NEW_BATCHES_HELD_SENTENCE = (
    "\nheld, because {}: {}; `forgekeeper run BATCH --dry-run` shows the deletions of a batch,"
    " `forgekeeper release BATCH --reason REASON` releases it"
)


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if migrations are pending.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until processes that would fail on the new tables have ended.")
    ] = False,
    json: Json = False,
) -> None:
    """Apply pending migrations of forgekeeper's own tables; the forge's tables are never changed.

    The first migration creates the installation's id, and writes it to Redis if Redis answers.  In a new installation
    all deleting batches are held until `release`, later each deleting batch that is added.  The command records its
    setting FORGEKEEPER_AUDIT_KEEP: workers drop no part of the audit that is younger.

    If running processes are too old for the new tables, the command names them and changes nothing.
    """
    with connect_command("migrate", migrated=False, redis_needed=False) as settings:
        if check:
            _report_pending(json=json)
            return
        _require_none_too_old(wait=wait)
        applied, held = _apply_and_hold_new(settings)
        _record_installation(redis_needed=settings.redis_url is not None)
    why = "this is a new installation" if FIRST_MIGRATION in applied else "nobody has seen a preview"
    sentence = f"applied: {', '.join(applied)}" if applied else UP_TO_DATE_SENTENCE
    said = sentence + (NEW_BATCHES_HELD_SENTENCE.format(why, ", ".join(held)) if held else "")
    print_answer({"applied": applied, "pending": [], "held": held}, said, json=json)


def _report_pending(*, json: bool) -> None:
    """Print pending migrations; raise `Problem` or `typer.Exit` if there are any."""
    pending, too_old = migrations.list_pending(database.obj), _find_too_old()
    if pending and not json:
        stop = f"stop these processes first, which are too old for it: {', '.join(too_old)}; " if too_old else ""
        raise Problem(f"pending migrations: {', '.join(pending)}; {stop}run `forgekeeper migrate`")
    print_answer({"applied": [], "pending": pending, "too_old": too_old}, UP_TO_DATE_SENTENCE, json=json)
    if pending:
        raise typer.Exit(FAILED_STATUS)


def _apply_and_hold_new(settings: Settings) -> tuple[list[str], list[str]]:
    """Apply migrations and record the setting; return their names and the batches held as new."""
    try:
        with database.atomic():
            applied = apply_pending()
            hold_new_batches(held := list_deleting_batches() if FIRST_MIGRATION in applied else find_added_batches())
            if (before := partitions.store_retention_days(days := settings.audit_keep)) != days:
                after = {"days": days}
                acts.record_act("migrate", "how long the audit is kept", before={"days": before}, after=after)
    except pw.ProgrammingError as error:
        if sqlstate(error) != MISSING_RIGHT_SQLSTATE:
            raise
        raise Problem(
            RUN_AS_OWNER_SENTENCE.format(clean_text(text_of(error).strip().splitlines()[0]), settings.own_schema)
        ) from error
    return applied, held


def _find_too_old() -> list[str]:
    """Return living processes that would fail after all pending migrations."""
    oldest = migrations.oldest_survivor(database.obj)
    if oldest is None or PROCESSES_MIGRATION in migrations.list_pending(database.obj):
        return []
    return Process.find_older(oldest)


def _require_none_too_old(*, wait: bool) -> None:
    """Raise `Problem` if processes of a version that is too old run, or *wait* until they have ended."""
    said: list[str] = []
    while found := _find_too_old():
        if not wait:
            raise Problem(TOO_OLD_SENTENCE.format(", ".join(found)))
        if found != said:
            err.print(f"waiting until these processes have ended: {clean_text(', '.join(found))}")
            said = found
        time.sleep(POLL_SECONDS)


def apply_pending() -> list[str]:
    """Apply pending migrations in one transaction and record them; return their names."""
    try:
        with database.atomic():
            applied = migrations.apply_pending(database.obj)
            if applied:
                acts.record_act("migrate", "the schema", after={"applied": applied})
            return applied
    except migrations.TablesElsewhere as error:
        raise Problem(str(error)) from error
    except migrations.TableExists as error:
        raise Problem(f"{error}: forgekeeper did not create it; rename it or set FORGEKEEPER_OWN_SCHEMA") from error


def _record_installation(*, redis_needed: bool) -> None:
    """Record the database's place and claim Redis.

    If Redis is away, a process that starts later claims it.
    """
    try:
        installation.record_first_place()
        if redis_needed:
            require_same_installation()
    except installation.ClusterUnreadable as unknown:
        err.print(f"batches are blocked: {unknown}; then run `forgekeeper migrate` again")
    except redis.RedisError as error:
        err.print(f"Redis lacks the installation's id: {clean_text(str(error))}; a worker or scheduler writes it")
    except InstallationMismatch as disagreement:
        err.print(f"no process will start: {clean_text(str(disagreement))}")
