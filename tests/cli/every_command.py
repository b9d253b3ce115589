"""Run every command of forgekeeper, each in a process of its own, and print as JSON what each came to.

Standard input names those to leave out.  A fork of one process that has imported everything is ten
times as quick as a new process; whatever becomes of it, a command that starts to serve included,
becomes of the fork alone.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile

from typer.main import get_command

from forgekeeper import cli
from forgekeeper.cli.commands import application
from forgekeeper.delivery.broker import load_batches

LIMIT = 30
"""Seconds that a command may take."""
SERVE = "Serve"
WORDS = {"batch": "user_status_cleanup", "location": "artifacts"}
FLAG = "bulk_delete_job_artifacts"
OPTIONS = {"everything": "--all", "yes": "--yes", "prefix": "--prefix=uploads", "reason": "--reason=because"}
WHOSE = {"objects hold": "--project=1", "refs restore": "--run=1"}
"""Without these a command would refuse to do what it is there for."""

AS_IT_IS = {"check": {"reason"}}
"""Options that are left out: with a reason `check` would be refused, as it only looks."""


def commands():
    """List the words that call each command, groups without a command included, and its declaration."""
    return list(_below(get_command(application())))


def _below(group, path=()):
    for name, command in group.commands.items():
        yield " ".join((*path, name)), command
        if hasattr(command, "commands"):
            yield from _below(command, (*path, name))


def arguments(words, command):
    """List what the command must be given, and what makes it act."""
    given = [
        WORDS.get(part.name, FLAG if words.startswith("flags ") else "1")
        for part in command.params
        if part.param_type_name == "argument" and part.required
    ]
    given += [WHOSE[words]] if words in WHOSE else []
    names = {part.name for part in command.params} - AS_IT_IS.get(words, set())
    return given + [option for name, option in OPTIONS.items() if name in names]


def serves(command):
    return command.rich_help_panel == SERVE


def call(words):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["forgekeeper", *words]
            signal.alarm(LIMIT)
            cli.main()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return [status, out.read().decode(), err.read().decode()]


def walk(environment, folder, leave_out=()):
    """Run every command but those *leave_out* in *environment*; return what each came to, by its words."""
    ended = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(list(leave_out)),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


if __name__ == "__main__":
    load_batches()
    left_out = json.load(sys.stdin)
    # Else each fork would copy all of it, only to have it looked through and taken down in its end.
    gc.freeze()
    called = {words: [*words.split(), *arguments(words, command)] for words, command in commands()}
    json.dump({name: call(words) for name, words in called.items() if name not in left_out}, sys.stdout)
