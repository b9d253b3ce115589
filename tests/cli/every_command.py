"""Every command there is, and what it must be given to act."""

from typer.main import get_command

from forgekeeper.cli.commands import build_application

WORDS = {
    "folder": "/dev/null/files",
    "batch": "user_status_cleanup",
    "location": "artifacts",
    "what": "project:1",
    "forge": "gitlab",
}
FLAG = "bulk_delete_job_artifacts"
OPTIONS = {
    "everything": "--all",
    "yes": "--yes",
    "prefix": "--prefix=uploads",
    "reason": "--reason=because",
    "role": "--role=viewer",
}
WHOSE = {"objects keep": "--project=1", "objects hold": "--project=1", "refs restore": "--run=1"}
"""Without these a command would refuse to do what it is there for."""
AS_IT_IS = {"check": {"reason"}}
"""Options that are left out: with a reason `check` would be refused, as it only looks."""


def commands():
    """List the words that call each command, groups without a command included, and its declaration."""
    return list(_below(get_command(build_application())))


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
    return command.rich_help_panel == "Serve"
