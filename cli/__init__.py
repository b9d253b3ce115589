"""The command `forgekeeper`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from cli import checking, dead, demo, git, ledger, metrics, objects, running, sample, serving, upkeep
from cli.console import WRONG_USE, Problem, err
from metrics.redaction import clean
from settings import SettingsError

app = typer.Typer(
    name="forgekeeper",
    help="Keep a code forge clean: a scheduler, workers, and the batches they run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Serve": (demo.demo, serving.up, serving.scheduler, serving.worker, serving.exporter),
    "Prepare": (checking.check, upkeep.migrate, upkeep.settings, metrics.metrics, sample.seed),
    "Run": (running.run, running.send, ledger.pause, ledger.resume),
    "Look": (ledger.status, ledger.ticks, ledger.why, objects.buckets),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(upkeep.flags, name="flags", rich_help_panel="Run")
app.add_typer(objects.uploads, name="uploads", rich_help_panel="Look")
app.add_typer(objects.objects, name="objects", rich_help_panel="Look")
app.add_typer(git.refs, name="refs", rich_help_panel="Look")
app.add_typer(git.leases, name="leases", rich_help_panel="Look")
app.add_typer(dead.dead, name="dead", rich_help_panel="Look")


def main() -> None:
    """Run the command line; an error is one sentence on standard error, and an exit status."""
    try:
        # Typer returns the status of `typer.Exit`, and whatever else a command returns: nothing.
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="forgekeeper", standalone_mode=False))
    except Problem as problem:
        _complain(str(problem), problem.status)
    except SettingsError as error:
        _complain(str(error), WRONG_USE)
    except typer.TyperException as error:
        _complain(_usage(error), WRONG_USE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _complain(sentence: str, status: int) -> NoReturn:
    err.print(f"forgekeeper: {clean(sentence)}", style="red")
    sys.exit(status)


def _usage(error: typer.TyperException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "forgekeeper"
    return f"{' '.join(message.split()).rstrip('.')}; `{command} --help` says how it is used"
