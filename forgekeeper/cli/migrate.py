"""`migrate`: create and change forgekeeper's own tables."""

from __future__ import annotations

import time
from typing import Annotated

import peewee as pw
import redis
import typer

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.audit import acts, upkeep
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Deletion
from forgekeeper.cli.connection import connected
from forgekeeper.cli.holding import FIRST, find_added, hold_new, name_deleting
from forgekeeper.cli.terminal import FAILED, Json, Problem, answer, err
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.notices import Notice
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.totals import RunTotal
from forgekeeper.platform import installation, migrations
from forgekeeper.platform.database import Base, database, sqlstate
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.platform.installation import Disagreement, Installation, agree
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from metrics.logs import clean, text_of

OURS: tuple[type[Base], ...] = (
    *(FeatureFlag, Batch, Hold, Exclusion, JobRun, DeletedObject, Process, Installation),
    *(Quarantined, Notice, SettledUpload, RunTotal, Act, Deletion),
)
"""Forgekeeper's own tables: it migrates them, and no other program writes to them."""
FORBIDDEN = "42501"
UP_TO_DATE = "the schema is up to date"
OWNER = (
    "{}: nothing was changed; run `forgekeeper migrate` as the role that owns forgekeeper's tables, or, where there is"
    " no schema for them yet, let a superuser run `create schema {} authorization ROLE` (docs/security.md)"
)
TOO_OLD = (
    "nothing was changed: processes of an older version would fail on the new tables: {}; stop them, or let"
    " `forgekeeper migrate --wait` wait until they have ended"
)
PROCESSES = "0007_processes"
"""Migration that creates the table of processes."""
POLL_SECONDS = 0.5
NEW = (
    "\nheld, as {}: {}; `forgekeeper run BATCH --dry-run` shows what each will delete,"
    " `forgekeeper release BATCH --reason REASON` lets it go"
)


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if migrations are pending.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until processes that would fail on the new tables have ended.")
    ] = False,
    json: Json = False,
) -> None:
    """Apply pending migrations of forgekeeper's own tables; the forge's are never touched.

    The first one makes the installation's id, and writes it to Redis if that answers.  In a new installation the
    batches that delete begin held, later each batch that was added since: `release` lets them go.  The setting
    FORGEKEEPER_AUDIT_KEEP of this command is recorded: workers drop no part of the audit that is younger.

    Nothing is changed while processes live whose version is too old for the new tables; they are named.
    """
    with connected("migrate", migrated=False, redis_needed=False) as settings:
        if check:
            _report_pending(json=json)
            return
        _require_none_too_old(wait=wait)
        applied, held = _migrate(settings)
        _record_installation(redis_needed=settings.redis_url is not None)
    why = "this is a new installation" if FIRST in applied else "nobody has seen its preview"
    sentence = f"applied: {', '.join(applied)}" if applied else UP_TO_DATE
    said = sentence + (NEW.format(why, ", ".join(held)) if held else "")
    answer({"applied": applied, "pending": [], "held": held}, said, json=json)


def _report_pending(*, json: bool) -> None:
    """Print pending migrations; raise `Problem` or `typer.Exit` if there are any."""
    pending, too_old = migrations.pending(database.obj), _find_too_old()
    if pending and not json:
        stop = f"stop these first, which are too old for it: {', '.join(too_old)}; " if too_old else ""
        raise Problem(f"pending: {', '.join(pending)}; {stop}run `forgekeeper migrate`")
    answer({"applied": [], "pending": pending, "too_old": too_old}, UP_TO_DATE, json=json)
    if pending:
        raise typer.Exit(FAILED)


def _migrate(settings: Settings) -> tuple[list[str], list[str]]:
    """Apply migrations and record the setting; return their names and the batches held as new."""
    try:
        with database.atomic():
            applied = apply_pending()
            hold_new(held := name_deleting() if FIRST in applied else find_added())
            if (before := upkeep.keep(days := settings.audit_keep)) != days:
                after = {"days": days}
                acts.record("migrate", "how long the audit is kept", before={"days": before}, after=after)
    except pw.ProgrammingError as error:
        if sqlstate(error) != FORBIDDEN:
            raise
        raise Problem(OWNER.format(clean(text_of(error).strip().splitlines()[0]), settings.own_schema)) from error
    return applied, held


def _find_too_old() -> list[str]:
    """Return living processes that would fail after all pending migrations."""
    oldest = migrations.oldest_survivor(database.obj)
    if oldest is None or PROCESSES in migrations.pending(database.obj):
        return []
    return Process.find_older(oldest)


def _require_none_too_old(*, wait: bool) -> None:
    """Raise `Problem` if such processes live, or *wait* until the last of them has ended."""
    said: list[str] = []
    while found := _find_too_old():
        if not wait:
            raise Problem(TOO_OLD.format(", ".join(found)))
        if found != said:
            err.print(f"waiting until these have ended: {clean(', '.join(found))}")
            said = found
        time.sleep(POLL_SECONDS)


def apply_pending() -> list[str]:
    """Apply pending migrations in one transaction and record them; return their names."""
    try:
        with database.atomic():
            applied = migrations.migrate(database.obj)
            if applied:
                acts.record("migrate", "the schema", after={"applied": applied})
            return applied
    except migrations.Elsewhere as error:
        raise Problem(str(error)) from error
    except migrations.TableExists as error:
        raise Problem(f"{error}: it was not made by forgekeeper; rename it or set FORGEKEEPER_OWN_SCHEMA") from error


def _record_installation(*, redis_needed: bool) -> None:
    """Record the database's place and claim Redis.

    If Redis is away, a process that starts later claims it.
    """
    try:
        installation.record_first()
        if redis_needed:
            agree()
    except installation.Unknown as unknown:
        err.print(f"batches are blocked: {unknown}; then run `forgekeeper migrate` again")
    except redis.RedisError as error:
        err.print(f"Redis does not know the installation yet: {clean(str(error))}; workers and schedulers tell it")
    except Disagreement as disagreement:
        err.print(f"nothing will start: {clean(str(disagreement))}")
