"""The documentation's page of commands: what each is called with, and what its exit status means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import typer

INTRODUCTION = """# Commands

Answers go to standard output; progress, logs and errors go to standard error. An error is one
sentence that begins with `forgekeeper: ` and says what to do. With `--json` standard output carries
one JSON object and nothing else. `-h` or `--help` explains every command;
`forgekeeper --install-completion` lets the shell complete commands, batches, flags and queues.

This page is printed by `forgekeeper --markdown`.

## Exit statuses

| status | when |
|---|---|
| 0 | it was done, or there was nothing to do; single records that failed, and a run that was skipped, are part of the answer |
| 1 | it failed: a server refused something or was not there, what was named does not exist, or standard output took no more |
| 2 | wrong use: the command line, the settings or a value in them; nothing was done |
| 3 | the batch is held, or its run was blocked: nothing was done, standard error says why |
| 130 | Ctrl-C ended it (128 + SIGINT) |
| 141 | whoever read its output has gone, as `head` does (128 + SIGPIPE) |

What a command means by them beyond that stands with the command.
"""  # noqa: E501, a row of a table is one line
MEANINGS: dict[str, dict[int | Literal["other"], str]] = {
    "demo": {0: "every figure is as expected", 1: "one is not, or the servers did not start", 143: "SIGTERM ended it"},
    "up": {0: "Ctrl-C or SIGTERM ended it", 1: "one of its processes ended by itself, so all were ended"},
    "scheduler": {0: "SIGTERM or Ctrl-C ended it", 1: "one of its loops broke: start it again"},
    "worker": {
        0: "SIGTERM or Ctrl-C ended it, after its runs had come to a safe point, or while it waited for its servers",
        1: "its time was up (`FORGEKEEPER_SHUTDOWN_TIMEOUT`) before all it was at had ended; others take over",
        "other": "one of its processes has died or could not start: start it again",
    },
    "exporter": {0: "SIGTERM or Ctrl-C ended it"},
    "check": {0: "no line is an error; there may be warnings", 1: "at least one line is an error"},
    "migrate": {0: "nothing is pending any more", 1: "with `--check`: something is pending"},
    "run": {
        0: "the run ended well or was skipped: the answer has `skipped`; with `--dry-run`: this is what it would do",
        1: "the run or one of its children failed",
        3: "the batch is held, or the run or one of its children was blocked: the answer has `skipped`",
    },
    "send": {
        0: "it was sent, or is on its way, paused or stopped: the answer has `skipped`",
        3: "the batch is held",
    },
    "pause": {0: "every batch is paused", 1: "one is not, and is named; the others are"},
    "stop": {
        0: "every batch is stopped, also where a last chunk takes longer than was waited: the answer has `at_work`",
        1: "one is not, and is named; the others are",
    },
    "cancel": {
        0: "it is cancelled, or had ended: the answer has its `state`",
        1: "the ledger has no run of that number",
    },
    "resume": {
        0: "the batches are neither paused nor stopped, whether they were before or not",
        1: "one could not be resumed, and is named; the others were",
        3: "somebody else still pauses or stops one: the answer has `left`",
    },
    "release": {
        0: "no brake holds the batches, whether one did before or not",
        3: "of one of them it cannot be counted now what is due: it is still held",
    },
    "why": {0: "the story was told, that there is none included", 1: "the ledger has no run of that number"},
    "quarantine show": {1: "nothing of that id lies there"},
    "quarantine retry": {1: "the one that was named does not lie there, or is a message that nothing can read"},
    "quarantine discard": {1: "the one that was named does not lie there"},
    "leases break": {1: "nobody holds it"},
}
"""What a status means where it says more than the table above."""


def page(app: typer.Typer) -> str:
    """Write the page of all commands of *app*."""
    sections = "".join(_section(words, command) for words, command in commands(typer.main.get_command(app)))
    return INTRODUCTION + sections


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the words that call each command below *group*, and the command: Typer's own, which has no types."""
    for name, command in group.commands.items():
        words = " ".join((*path, name))
        if hasattr(command, "commands"):
            yield words, command
            yield from commands(command, (*path, name))
        else:
            yield words, command


def _section(words: str, command: Any) -> str:
    given = [_name(one) for one in command.params if one.param_type_name == "argument"]
    inner = " [COMMAND]" if hasattr(command, "commands") else ""
    usage = " ".join(["forgekeeper", words, *given]) + inner
    said = " ".join((command.help or "").split())
    return f"\n## `{usage}`\n\n{said}\n{_parameters(command)}{_statuses(words)}"


def _parameters(command: Any) -> str:
    rows = [
        f"| `{_name(one)}` | {(one.help or '').replace('|', 'or')} |\n" for one in command.params if one.name != "help"
    ]
    return "\n| argument or option | what it is for |\n|---|---|\n" + "".join(rows) if rows else ""


def _statuses(words: str) -> str:
    rows = [f"| {status} | {when} |\n" for status, when in MEANINGS.get(words, {}).items()]
    return "\n| status | when |\n|---|---|\n" + "".join(rows) if rows else ""


def _name(parameter: Any) -> str:
    """Write an argument as it stands in the usage, an option with what it takes."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        bare = name.strip("[]")
        return str(bare if parameter.required else f"[{bare}]").replace("|", " or ")
    takes = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return f"{', '.join(parameter.opts)}{takes}"
