"""The command line: what commands there are, and what becomes of their errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.cli import INTERRUPTED, importing, listing, streams
from forgekeeper.cli.console import FAILED, WRONG_USE, Problem, err, out
from forgekeeper.cli.streams import OutputLost
from metrics.redaction import clean

UNREAD = 128 + signal.SIGPIPE
HELP = {"-h", "--help", "--version"}
PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
"""How a command is declared whose arguments are another program's."""

BEFORE = {
    "Serve": "demo.demo serving.up serving.scheduler serving.worker serving.exporter",
    "Prepare": "checking.check upkeep.migrate upkeep.settings metrics.metrics batches.batches sample.seed",
    "Run": "running.run running.send holding.pause holding.stop holding.cancel holding.resume releasing.release "
    "upkeep.flags",
    "Look": "status.status presence.processes ledger.ticks ledger.why audit.audit",
}
"""The commands that come before those of the batches, by their panels: a module, and what it calls the command."""
AFTER = {"Look": "programs.redis programs.psql quarantine.quarantine leases.leases"}
RENAMED = {
    "dead": "quarantine list --kind child",
    "records": "quarantine list --kind record",
    "uploads failed": "quarantine list --kind upload",
    "uploads retry": "quarantine retry",
    "objects failed": "quarantine list --kind object",
    "objects retry": "quarantine retry",
    "refs rejected": "quarantine list --kind ref",
    "refs retry": "quarantine retry",
}
"""What commands were called before: for one release each says what it is called now."""
LOOKING = {"status", "processes", "ticks", "why", "audit"}
"""Those that send nothing: they need no broker and no actors, whose modules take a fifth of a second to import."""


class Command(NamedTuple):
    """Where a command of ours is found: its module is imported when it is called, or the whole is asked for."""

    panel: str
    module: str

    def add(self, app: typer.Typer, name: str) -> None:
        """Import the command, and add it to *app*."""
        of_module = getattr(import_module(f"forgekeeper.cli.{self.module}"), name)
        _add(app, {name: of_module}, self.panel, PASSED_ON if self.module == "programs" else None)


def _listed(panels: Mapping[str, str]) -> dict[str, Command]:
    pairs = [(panel, *one.split(".")) for panel, places in panels.items() for one in places.split()]
    return {name: Command(panel, module) for panel, module, name in pairs}


OURS = _listed(BEFORE) | _listed(AFTER)


@cache
def application() -> typer.Typer:
    """Return all commands: ours, and those that the batches bring, the latest declared first."""
    from forgekeeper.batches import BATCHES

    app = _empty()
    for name, command in _listed(BEFORE).items():
        command.add(app, name)
    for batch in reversed(BATCHES.values()):
        _add(app, import_module(batch.commands).COMMANDS if batch.commands else {})
    for name, command in _listed(AFTER).items():
        command.add(app, name)
    return app


def _only(name: str) -> typer.Typer:
    """Return no command but that one."""
    app = _empty()
    OURS[name].add(app, name)
    return app


def _overview() -> typer.Typer:
    """Return what can be shown as help, and not be called: the lines of all commands."""
    app = _empty()
    for panel, sentences in listing.LINES.items():
        for name, sentence in sentences.items():
            app.command(name, help=sentence, rich_help_panel=panel)(_nothing)
    return app


def _nothing() -> None:
    pass


def _empty() -> typer.Typer:
    return typer.Typer(
        name="forgekeeper",
        callback=forgekeeper,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def _add(
    app: typer.Typer,
    commands: Mapping[str, typer.Typer | Callable[..., None]],
    panel: str = "Look",
    settings: dict[str, Any] | None = None,
) -> None:
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel, context_settings=settings)(command)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out.print(f"forgekeeper {version('forgekeeper')}")
        raise typer.Exit


def _show_page(asked: bool) -> None:
    if asked:
        from forgekeeper.cli.reference import page

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
        _refuse_renamed(arguments)
        if listing.suffices(arguments):
            return _called(_overview(), ["--help"])
        return _declared_and_called(arguments)
    except Problem as problem:
        return _complained(str(problem), problem.status)
    except typer.TyperException as error:
        return _complained(_usage(error), WRONG_USE)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED if ended.code else 0
    except KeyboardInterrupt:
        return INTERRUPTED


def _refuse_renamed(arguments: list[str]) -> None:
    for old in (arguments[:1], arguments[:2]):
        if new := RENAMED.get(" ".join(old)):
            raise Problem(f"`forgekeeper {' '.join(old)}` is now `forgekeeper {new}`", WRONG_USE)


def _declared_and_called(arguments: list[str]) -> int:
    with importing():
        # Only for whoever asks for more than the list of commands.
        from forgekeeper.cli.connection import explained
        from forgekeeper.settings import SettingsError
    try:
        with importing():
            app = _declared(arguments)
        with explained():
            return _called(app, arguments or ["--help"])
    except SettingsError as error:
        raise Problem(str(error), WRONG_USE) from error


def _declared(arguments: list[str]) -> typer.Typer:
    """Import the batches, and the command that is called, or all where none of ours is."""
    from forgekeeper.settings import SettingsError

    name = next(iter(arguments), "")
    try:
        _let_batches_be_known(actors=name not in LOOKING)
    except SettingsError:
        # Whoever only asks for help gets it, whatever the settings say.
        if arguments and HELP.isdisjoint(arguments):
            raise
    return _only(name) if name in OURS else application()


def _let_batches_be_known(*, actors: bool) -> None:
    if actors:
        from forgekeeper.process.boot import load_batches

        load_batches()
    else:
        from forgekeeper import boot
        from forgekeeper.settings import reading

        boot.declare(reading.modules())


def _called(app: typer.Typer, arguments: list[str]) -> int:
    # Typer returns the status of `typer.Exit`, and whatever else a command returns: nothing.
    return app(arguments, prog_name="forgekeeper", standalone_mode=False) or 0


def _complained(sentence: str, status: int) -> int:
    err.print(f"forgekeeper: {clean(sentence)}", style="red")
    return status


def _usage(error: typer.TyperException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "forgekeeper"
    return f"{' '.join(message.split()).rstrip('.')}; `{command} --help` says how it is used"
