"""The command line: its commands, and the exit status and sentence of each exception."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Annotated

import peewee as pw
import redis
import typer

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.cli import (
    audit,
    check,
    contract,
    declared,
    exclude,
    files,
    grants,
    holding,
    migrate,
    process_list,
    quarantine,
    refs,
    running,
    serving,
    status,
    streams,
    ticks,
    uploads,
    webhook,
)
from forgekeeper.cli.connection import describe_with_remedy
from forgekeeper.cli.streams import OutputLost
from forgekeeper.cli.terminal import FAILED_STATUS, WRONG_USE_STATUS, Problem, err, out
from forgekeeper.delivery.broker import load_batches
from forgekeeper.engine.ref_restoring import list_children_with_refs
from forgekeeper.ledger.heartbeats import read_version
from forgekeeper.platform.settings import SettingsError
from metrics.endpoint import PortTaken
from metrics.logs import clean_text

INTERRUPTED_STATUS, UNREAD_OUTPUT_STATUS = 128 + signal.SIGINT, 128 + signal.SIGPIPE
HELP_OPTIONS = {"-h", "--help", "--version"}
DEMO_COMMAND_MODULES = dict.fromkeys(("demo", "up", "seed"), "demo.commands")
"""Commands of the demo by their module, which no production process imports."""
LATE_COMMAND_MODULES = DEMO_COMMAND_MODULES | {
    "console": "forgekeeper.cli.console.command",
    "adopt": "forges.command",
    "peek": "forges.command",
}
"""Commands that import the command line themselves, by their modules."""
COMMAND_PANELS: dict[str, tuple[Callable[..., None] | typer.Typer | str, ...]] = {
    "Serve": ("demo", "up", serving.scheduler, serving.worker, serving.exporter, "console"),
    "Prepare": (
        *(check.check, migrate.migrate, grants.grants, contract.contract, "adopt", files.files),
        *(declared.settings, declared.metrics, declared.batches, webhook.webhook, "seed"),
    ),
    "Run": (
        *(running.run, running.send, holding.pause, holding.stop, running.cancel, holding.resume),
        *(holding.release, exclude.exclude, declared.flags),
    ),
    "Look": (
        *("peek", status.status, process_list.processes, ticks.ticks, ticks.why, audit.audit),
        *(quarantine.quarantine, process_list.leases),
    ),
}
"""Commands by their help panels."""
SERVING_COMMANDS = {"scheduler", "worker", "exporter"}
REMOVED_COMMANDS = {
    "psql": 'psql "$FORGEKEEPER_DATABASE_URL"',
    "redis": 'redis-cli -u "$FORGEKEEPER_REDIS_URL"',
    "dead": "forgekeeper quarantine list --kind child",
    "records": "forgekeeper quarantine list --kind record",
    "uploads failed": "forgekeeper quarantine list --kind upload",
    "uploads retry": "forgekeeper quarantine retry",
    "objects failed": "forgekeeper quarantine list --kind object",
    "objects retry": "forgekeeper quarantine retry",
    "refs rejected": "forgekeeper quarantine list --kind ref",
    "refs retry": "forgekeeper quarantine retry",
}
"""Commands of the last release and their replacements."""
REMOVED_OPTIONS = {
    "settings --markdown": "read docs/settings.md",
    "metrics --markdown": "read docs/metrics.md",
    "batches --markdown": "run `forgekeeper batches --json`",
    "resume --id": "run `forgekeeper resume BATCH --by NAME`",
    "status --watch": "run `watch forgekeeper status`",
    "audit --batch": "use --what for a record or --run for a run",
    "audit --until": "use --since",
}
"""Options of the last release and their replacements."""
NEEDLESS_OPTIONS = {
    "pause --forever": "without --until a pause has no end",
    "stop --no-wait": "it never waits",
    "flags on --yes": "it does not ask",
}
"""Options of the last release that name today's default behaviour."""
OLD_DURATION = re.compile(r"\+((?:\d+[wdhms])+)")


@cache
def build_application(*, demo: bool = True) -> typer.Typer:
    """Return all commands: ours, commands of batches and, if *demo*, commands of the demo."""
    app = typer.Typer(
        name="forgekeeper",
        callback=forgekeeper,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for panel, commands in COMMAND_PANELS.items():
        for command in commands:
            if not isinstance(command, str):
                _add_command(app, panel, command)
            elif demo or command not in DEMO_COMMAND_MODULES:
                _add_command(app, panel, getattr(import_module(LATE_COMMAND_MODULES[command]), command))
    if list_children_with_refs():
        _add_command(app, "Look", refs.refs)
    for module in dict.fromkeys(module for batch in BATCHES.values() for module in _list_command_modules(batch)):
        for name, command in import_module(module).COMMANDS.items():
            _add_command(app, "Look", command, name)
    if uploads.find_holders():
        _add_command(app, "Look", uploads.uploads)
    return app


def _list_command_modules(batch: BatchSpec) -> Iterator[str]:
    """Yield the modules of a batch's commands: derived from its declaration, and its own."""
    if batch.buckets is not None:
        yield "forgekeeper.cli.buckets"
    if batch.restorable:
        yield "forgekeeper.cli.objects"
    if batch.commands:
        yield batch.commands


def _add_command(
    app: typer.Typer, panel: str, command: Callable[..., None] | typer.Typer, name: str | None = None
) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name or command.info.name, rich_help_panel=panel)
    else:
        app.command(name, rich_help_panel=panel)(command)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"forgekeeper {read_version()}")
        raise typer.Exit


def forgekeeper(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep a code forge clean: a scheduler, workers, and the batches they run.

    Exit status: 0 done, nothing to do, or skipped; 1 failed; 2 wrong use or settings, nothing was done; 3 the batch is
    held or its run was blocked; 130 ended by Ctrl-C.  An error is one sentence on standard error.
    """


def run_command_line(arguments: list[str]) -> int:  # noqa: PLR0911, one for each way to end
    """Run the command line and return its exit status.

    An error is one sentence on standard error.
    """
    try:
        status = _call_command(arguments or ["--help"])
        sys.stdout.flush()
    except OutputLost as lost:
        streams.discard_output()
        return (
            UNREAD_OUTPUT_STATUS
            if lost.is_reader_closed
            else _print_error(f"cannot write to standard output: {lost}", FAILED_STATUS)
        )
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED_STATUS if ended.code else 0
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except Problem as problem:
        return _print_error(str(problem), problem.status)
    except SettingsError as error:
        return _print_error(str(error), WRONG_USE_STATUS)
    except typer.TyperException as error:
        return _print_error(_describe_usage_error(error), WRONG_USE_STATUS)
    except (pw.PeeweeException, redis.RedisError, PortTaken, OSError) as error:
        if (said := describe_with_remedy(error)) is None:
            raise
        return _print_error(said, FAILED_STATUS)
    else:
        return status


def _call_command(arguments: list[str]) -> int:
    for old in (arguments[0], " ".join(arguments[:2])):
        if old in REMOVED_COMMANDS:
            raise Problem(f"there is no command `{old}` any more: run `{REMOVED_COMMANDS[old]}`", WRONG_USE_STATUS)
    arguments = _without_old_options(arguments)
    try:
        load_batches()
    except SettingsError:
        if HELP_OPTIONS.isdisjoint(arguments):
            raise
    # Typer returns the status of `typer.Exit`.
    return (
        build_application(demo=arguments[0] not in SERVING_COMMANDS)(
            arguments, prog_name="forgekeeper", standalone_mode=False
        )
        or 0
    )


def _without_old_options(arguments: list[str]) -> list[str]:
    """Remove needless options with a message; raise `Problem` for a removed option."""
    for written, instead in (REMOVED_OPTIONS | NEEDLESS_OPTIONS).items():
        words, _, option = written.rpartition(" ")
        begin = words.split()
        if arguments[: len(begin)] != begin or option not in {one.partition("=")[0] for one in arguments}:
            continue
        if written in REMOVED_OPTIONS:
            raise Problem(f"`{words}` has no {option} any more: {instead}", WRONG_USE_STATUS)
        err.print(f"forgekeeper: `{words}` needs no {option} any more: {instead}")
        arguments = [one for one in arguments if one != option]
    for duration in filter(None, map(OLD_DURATION.fullmatch, arguments)):
        err.print(f"forgekeeper: write {duration[1]} instead of {duration[0]}")
    return arguments


def _print_error(sentence: str, status: int) -> int:
    err.print(f"forgekeeper: {clean_text(sentence)}", style="red")
    return status


def _describe_usage_error(error: typer.TyperException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    command = getattr(getattr(error, "ctx", None), "command_path", "forgekeeper")
    return f"{' '.join(message.split()).rstrip('.')}; see `{command} --help`"
