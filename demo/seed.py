"""The command `seed`: the example forge's tables and sample data."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import track

from demo.sample_data import SAMPLE_DATA, Sample
from demo.tables import make_tables
from forgekeeper import migrations
from forgekeeper.audit import acts
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
            _make_tables()
        seeded = add_samples(scale, settings) if scale else []
    if not seeded and not json:
        out.print("the tables of the example forge are there; no sample data was put in")
    elif json:
        emit({made.what.replace(" ", "_"): {"total": made.total, "due": made.due} for made in seeded})
    else:
        table("", ("sample data", "total", "due"), ((made.what, f"{made.total:,}", f"{made.due:,}") for made in seeded))


def add_samples(scale: int, settings: Settings) -> list[Sample]:
    """Add all sample data, with progress on a terminal; return what was added."""
    samples = SAMPLE_DATA.values()
    hidden = not err.is_terminal
    return [
        add(scale, settings) for add, _ in track(samples, "sample data", console=err, transient=True, disable=hidden)
    ]


def _make_tables() -> None:
    try:
        make_tables(database.obj)
    except migrations.TableExists as error:
        raise Problem(f"{error}: this database is a forge's own, sample data does not belong there") from error
