"""The commands `peek` and `adopt`, which read a forge's tables and adapt them.

Every command reads this module for its help, and only the setting `FORGEKEEPER_BATCHES` may import batches and models:
these commands import them when they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.cli.terminal import Json


def adopt(
    forge: Annotated[str, typer.Argument(metavar="FORGE", help="The forge of the tables: gitlab, forgejo or gitea.")],
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", help="The role of forgekeeper's connections; it is granted the views.")
    ] = None,
    tables: Annotated[str, typer.Option("--tables", help="The schema of the forge's own tables.")] = "public",
    json: Json = False,
) -> None:
    """Create views of a forge's own tables, with the columns that the batches need.

    The views are created in the schema FORGEKEEPER_FORGE_SCHEMA.  Run this as the role that owns the forge's tables,
    and again after an upgrade of the forge.  No row is changed.
    """
    from forges.adopt_command import create_views

    create_views(forge, print_=print_, role=role, tables=tables, json=json)


def peek(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="The forge's database; by default FORGEKEEPER_DATABASE_URL.", show_default=False
        ),
    ] = None,
    forge: Annotated[
        str | None, typer.Option("--forge", help="The forge, if not recognized: gitlab, forgejo, gitea or example.")
    ] = None,
    tables: Annotated[str, typer.Option("--tables", help="The schema of the forge's tables.")] = "public",
    seconds: Annotated[
        float, typer.Option(min=1, max=3_600, help="Time limit for all counts; then it estimates.")
    ] = 30,
    json: Json = False,
) -> None:
    """Show what each batch would delete from a forge's database now, without an installation.

    It only reads: nothing is created or locked, and Redis is not used.  A role that may select from the forge's tables
    is enough, and so is a standby.
    """
    from forges.peek_command import print_due_records

    print_due_records(url, forge=forge, tables=tables, seconds=seconds, json=json)
