"""The command line: what commands there are, and what becomes of their errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from forgekeeper.batches import BATCHES
from forgekeeper.cli import (
    INTERRUPTED,
    audit,
    batches,
    checking,
    dead,
    demo,
    holding,
    leases,
    ledger,
    metrics,
    presence,
    programs,
    records,
    releasing,
    running,
    sample,
    serving,
    status,
    streams,
    upkeep,
)
from forgekeeper.cli.connection import explained
from forgekeeper.cli.console import FAILED, WRONG_USE, Problem, err, out
from forgekeeper.cli.reference import page
from forgekeeper.cli.streams import OutputLost
from forgekeeper.process.boot import load_batches
from forgekeeper.settings import SettingsError
from metrics.redaction import clean

UNREAD = 128 + signal.SIGPIPE
HELP = {"-h", "--help", "--version"}

PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Serve": (demo.demo, serving.up, serving.scheduler, serving.worker, serving.exporter),
    "Prepare": (checking.check, upkeep.migrate, upkeep.settings, metrics.metrics, batches.batches, sample.seed),
    "Run": (
        *(running.run, running.send, holding.pause, holding.stop, holding.cancel, holding.resume),
        releasing.release,
    ),
    "Look": (status.status, presence.processes, ledger.ticks, ledger.why, audit.audit),
}


@cache
def application() -> typer.Typer:
    """Return all commands: ours, and those that the batches bring, the latest declared first."""
    app = typer.Typer(
        name="forgekeeper",
        callback=forgekeeper,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for panel, commands in PANELS.items():
        for command in commands:
            app.command(rich_help_panel=panel)(command)
    app.add_typer(upkeep.flags, name="flags", rich_help_panel="Run")
    for batch in reversed(BATCHES.values()):
        _add(app, import_module(batch.commands).COMMANDS if batch.commands else {})
    for command in (programs.redis, programs.psql):
        app.command(rich_help_panel="Look", context_settings=programs.PASSED_ON)(command)
    _add(app, {"records": records.records, "leases": leases.leases, "dead": dead.dead})
    return app


def _add(app: typer.Typer, commands: Mapping[str, typer.Typer | Callable[..., None]]) -> None:
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel="Look")
        else:
            app.command(name, rich_help_panel="Look")(command)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"forgekeeper {version('forgekeeper')}")
        raise typer.Exit


def _show_page(asked: bool) -> None:
    if asked:
        out.print(page(application()), end="")
        raise typer.Exit


def forgekeeper(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    _page: Annotated[
        bool,
        typer.Option(
            "--markdown", callback=_show_page, is_eager=True, help="Print the page docs/commands.md and exit."
        ),
    ] = False,
) -> None:
    """Keep a code forge clean: a scheduler, workers, and the batches they run."""


def run(arguments: list[str]) -> int:
    """Run the command line; return its exit status, with whatever was wrong said in one sentence on standard error."""
    try:
        status = _status(arguments)
        sys.stdout.flush()
    except OutputLost as lost:
        streams.discard()
        # Whoever reads no further, such as `head`, wants no complaint; the status is a shell's for SIGPIPE.
        return UNREAD if lost.unread else _complained(f"cannot write to standard output: {lost}", FAILED)
    return status


def _status(arguments: list[str]) -> int:
    try:
        _declare(arguments)
        with explained():
            # Typer returns the status of `typer.Exit`, and whatever else a command returns: nothing.
            return application()(arguments or ["--help"], prog_name="forgekeeper", standalone_mode=False) or 0
    except Problem as problem:
        return _complained(str(problem), problem.status)
    except SettingsError as error:
        return _complained(str(error), WRONG_USE)
    except typer.TyperException as error:
        return _complained(_usage(error), WRONG_USE)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED if ended.code else 0
    except KeyboardInterrupt:
        return INTERRUPTED


def _declare(arguments: list[str]) -> None:
    """Let the batches be known; whoever only asks for help gets it, whatever the settings say."""
    try:
        load_batches()
    except SettingsError:
        if arguments and HELP.isdisjoint(arguments):
            raise


def _complained(sentence: str, status: int) -> int:
    err.print(f"forgekeeper: {clean(sentence)}", style="red")
    return status


def _usage(error: typer.TyperException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "forgekeeper"
    return f"{' '.join(message.split()).rstrip('.')}; `{command} --help` says how it is used"
