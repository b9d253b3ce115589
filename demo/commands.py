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
    """Show the whole system at work, on servers and data of its own, and clean up after it.

    Exit status 0 only if every figure is as expected.
    """
    from demo.tour import show_everything

    show_everything(keep=keep)


def up(
    sample: Annotated[
        bool, typer.Option("--sample", help="With sample data in .forgekeeper/; more expires each minute.")
    ] = False,
) -> None:
    """Run everything in this terminal: a scheduler, a worker for `cron` and `objects`, one for the children's queues.

    With them an exporter, and the console where its extra is installed.

    Where no URLs are set, PostgreSQL and Redis are embedded and keep their data in
    `.forgekeeper/`.  Ctrl-C ends it all, the runs first.
    """
    from demo.up import run_everything

    run_everything(sample=sample)


def seed(
    scale: Annotated[int, typer.Option(min=0, help="So many times the usual amount; 0: the tables alone.")] = 1,
    json: Json = False,
) -> None:
    """Fill the database with sample data, beside what is there; make the example forge's tables first.

    Refuses a database that holds a forge's own tables.
    """
    from demo.sample_data import fill_database

    fill_database(scale, json=json)
