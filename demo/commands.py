"""Commands of the demo, which import their modules when they run.

Every command reads this module for its help. The demo imports the example batches and models, which declares these
batches; only the setting `FORGEKEEPER_BATCHES` may do that.
"""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.cli.terminal import Json


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running, with its console, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the whole system at work, on temporary servers and data, and remove them afterwards.

    Exit status 0 only if every figure is as expected.
    """
    from demo.tour import show_everything

    show_everything(keep=keep)


def up(
    sample: Annotated[
        bool, typer.Option("--sample", help="Use sample data in .forgekeeper/; more records expire each minute.")
    ] = False,
) -> None:
    """Run everything in this terminal: a scheduler, a worker for `cron` and `objects`, a worker for children.

    Also an exporter, and the console if its extra is installed.

    If no URLs are set, PostgreSQL and Redis are embedded, with their data in `.forgekeeper/`.  Ctrl-C ends everything,
    the runs first.
    """
    from demo.up import run_everything

    run_everything(sample=sample)


def seed(
    scale: Annotated[int, typer.Option(min=0, help="Multiple of the usual amount; 0 only creates the tables.")] = 1,
    json: Json = False,
) -> None:
    """Create the example forge's tables, and add sample data to the database.

    It refuses a database with a forge's own tables.
    """
    from demo.sample_data import fill_database

    fill_database(scale, json=json)
