"""The command `peek`: count the rows in a forge's own tables that each batch would delete.

It creates nothing, locks no row, and asks neither Redis nor forgekeeper's own tables. Common table expressions replace
the views of an adoption, so a role that may only read the forge's tables, or a standby, is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import peewee as pw
from pydantic import SecretStr
from rich.filesize import decimal

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.cli.connection import describe_with_remedy, load_and_configure_logging
from forgekeeper.cli.terminal import (
    Problem,
    format_time,
    print_json,
    print_sentences,
    print_table,
    show_progress_line,
    wrong_use,
)
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database, now, release_connection
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.settings import Settings
from forges.adoption import AdoptionRefused
from forges.forge_tables import ADOPTION_CLASSES, EXAMPLE_FORGE, ForgeTables, recognize_forge
from forges.row_counts import RowCount, count_rows

NO_TABLES_ERROR = (
    "schema {} has no tables that a batch could delete from: name the schema of the forge's tables with --tables, or"
    " the forge with --forge"
)
CONNECT_TIMEOUT = timedelta(seconds=10)
SELECT_FLAG = "select enabled from forge_flags where name = %s"
NOT_COUNTED_REASONS = {
    "delete_objects": "its outbox is empty until expired_job_artifacts has run",
    "stale_direct_uploads": "its register of uploads is in Redis",
}


@dataclass
class PeekedBatch:
    """Records that a batch would delete now; *missing* lists missing tables and settings.

    *refused* is an error of PostgreSQL.
    """

    batch: str
    records: list[RowCount] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    note: str | None = None
    refused: str | None = None


def print_due_records(url: str | None, *, forge: str | None, tables: str, seconds: float, json: bool) -> None:
    """Print the records that each batch would delete; the command explains the arguments."""
    if forge not in (None, EXAMPLE_FORGE, *ADOPTION_CLASSES):
        wrong_use(f"there is no forge {forge!r}; there are: {', '.join((*ADOPTION_CLASSES, EXAMPLE_FORGE))}")
    settings = load_and_configure_logging()
    given = SecretStr(url) if url else settings.database_url
    if given is None:
        raise Problem("name a database: `forgekeeper peek postgresql://user@host/database`")
    settings = settings.model_copy(update={"database_url": given, "forge_schema": tables, "own_schema": tables})
    limits = ServerTimeouts.for_worker(settings.model_copy(update={"database_connect_timeout": CONNECT_TIMEOUT}))
    configure_clients(
        settings.model_copy(update={"redis_url": None}), limits, name="peek", connections=1, redis_needed=False
    )
    database.connect()
    try:
        with read_only_snapshot("peek"):
            instant, until = now(), time.monotonic() + seconds
            found = recognize_forge(tables, forge)
            batches = list(_count_batches(found, settings, instant, until))
        if not any(one.records for one in batches):
            raise Problem(next((one.refused for one in batches if one.refused), NO_TABLES_ERROR.format(tables)))
    except AdoptionRefused as unfit:
        raise Problem(str(unfit)) from None
    finally:
        release_connection()
        show_progress_line("")
    if json:
        print_json({"at": instant, "forge": found.forge_name, "schema": tables, "batches": list(map(asdict, batches))})
    else:
        _print_counts(found, instant, batches)


def _count_batches(found: ForgeTables, settings: Settings, instant: datetime, until: float) -> Iterator[PeekedBatch]:
    batches = [batch for batch in BATCHES.values() if batch.relations or batch.name in NOT_COUNTED_REASONS]
    for left, batch in zip(range(len(batches), 0, -1), batches, strict=True):
        show_progress_line(f"counting {batch.name}")
        share = time.monotonic() + max(0.0, until - time.monotonic()) / left
        yield _count_batch(batch, found, settings, instant, share)


def _count_batch(
    batch: BatchSpec, found: ForgeTables, settings: Settings, instant: datetime, until: float
) -> PeekedBatch:
    made = PeekedBatch(batch.name, note=NOT_COUNTED_REASONS.get(batch.name))
    made.missing += [lack for relation in batch.relations for lack in found.find_missing_parts(relation)]
    lacks_tables = bool(made.missing)
    made.missing += _find_missing_settings(batch, settings)
    if lacks_tables:
        return made
    try:
        made.missing += _find_flag(batch, found)
        shown = [
            one
            for declared in (batch, *batch.children)
            for find in declared.shown_rows
            for one in find(instant, settings)
        ]
        made.records += [count_rows(one, found, instant, until) for one in shown]
    except pw.DatabaseError as error:
        made.refused = describe_with_remedy(error) or str(error)
        made.missing.append(made.refused)
    return made


def _find_missing_settings(batch: BatchSpec, settings: Settings) -> Iterator[str]:
    if batch.known_repositories and settings.repositories_root is None:
        yield "FORGEKEEPER_REPOSITORIES_ROOT names no folder of repositories"
    if batch.deletes_from in {"artifacts", "stores"} and not settings.object_stores:
        yield "FORGEKEEPER_OBJECT_STORES names no object store"


def _find_flag(batch: BatchSpec, found: ForgeTables) -> Iterator[str]:
    """Yield a sentence if the batch's flag is off."""
    if batch.flag is None:
        return
    row = None
    if found.adoption and any(part.name == "flags" for part in found.adoption.adopted_parts):
        with read_only_snapshot("peek"):
            row = found.fetch_row(SELECT_FLAG, [batch.flag])
        if row is None or not row[0]:
            yield f"the forge's flag {batch.flag} is off"
    else:
        yield f"its flag is off in a new installation: `forgekeeper flags on {batch.flag}`"


def _print_counts(tables: ForgeTables, instant: datetime, batches: Sequence[PeekedBatch]) -> None:
    print_sentences(
        [f"{tables.forge_name}, schema {tables.schema}, at {format_time(instant)} UTC; nothing was created or changed"]
    )
    print_table(
        ("batch", "action", "records", "size", "due since", "kept"),
        [row for one in batches for row in _format_rows(one)],
    )
    if any(counted.estimate for one in batches for counted in one.records):
        print_sentences(["~ is an estimate by PostgreSQL, because the time was over: raise --seconds to count more"])
    for one in batches:
        print_sentences([] if one.note is None else [f"{one.batch} was not counted: {one.note}"])
        print_sentences([f"{one.batch} needs: {'; '.join(one.missing)}"] if one.missing else [])


def _format_rows(one: PeekedBatch) -> Iterator[tuple[Any, ...]]:
    for counted in one.records:
        about = "~" if counted.estimate else ""
        size = None if counted.bytes is None else f"{about}{decimal(counted.bytes)}"
        kept = ", ".join(f"{'?' if count is None else f'{count:,}'} {why}" for why, count in counted.kept.items())
        records = f"{about}{counted.records:,} {counted.record}"
        yield one.batch, counted.verb, records, size, counted.oldest and format_time(counted.oldest), kept
