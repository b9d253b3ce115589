"""`seed`: sample data, into a database that is forgekeeper's own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from forgekeeper import migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.brought import Sample
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import Json, Problem, emit, err, out, table
from forgekeeper.database import database
from forgekeeper.settings import Settings


def seed(
    scale: Annotated[int, typer.Option(min=0, help="So many times the usual amount; 0: the tables alone.")] = 1,
    json: Json = False,
) -> None:
    """Fill the database with sample data, beside what is there; make the example forge's tables first.

    Refuses a database that holds a forge's own tables.
    """
    with connected("seed") as settings:
        require_redis()
        with database.atomic():
            acts.record("seed", "sample data", after={"scale": scale})
            prepare()
        seeded = fill(scale, settings)
    if not seeded and not json:
        out.print("the tables of the example forge are there; no sample data was put in")
    elif json:
        emit({made.what.replace(" ", "_"): {"total": made.total, "due": made.due} for made in seeded})
    else:
        table("", ("sample data", "total", "due"), ((made.what, f"{made.total:,}", f"{made.due:,}") for made in seeded))


def prepare() -> None:
    """Make the example forge's tables; refuse a database that holds a forge's own."""
    try:
        migrations.migrate(database.obj, "example")
    except migrations.TableExists as error:
        raise Problem(f"{error}: this database is a forge's own, sample data does not belong there") from error


def fill(scale: int, settings: Settings) -> list[Sample]:
    """Put sample data in, with progress on a terminal; return what was put in."""
    prepare()
    samples = [make for batch in BATCHES.values() for make in batch.samples]
    seeded: list[Sample] = []
    if scale == 0:
        return seeded
    with Progress(console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("sample data", total=len(samples))
        for make in samples:
            seeded.append(make(scale, settings))
            progress.advance(task)
    return seeded
