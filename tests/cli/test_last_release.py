"""What scripts of the last release call still works, or says what to call instead."""

import pytest

from forgekeeper.cli.commands import NEEDLESS_OPTIONS, REMOVED_COMMANDS, REMOVED_OPTIONS
from tests.harness.every import every

from .every_command import commands

COMMANDS = """
demo:
up:
scheduler:
worker: --metrics-port --processes --queues --threads
exporter:
check: --copied --init --moved --reason
migrate: --check
settings: --markdown
metrics: --markdown
batches: --markdown
seed: --scale
run: --dry-run --sample
send:
pause: --all --forever --now --reason --until
stop: --all --no-wait --reason --until
cancel: --reason
resume: --all --by --id --reason
release: --all --expect --reason
status: --watch
processes:
ticks: --limit
why:
audit: --batch --limit --run --since --until --what --who
redis:
psql:
flags:
flags list:
flags on: --yes
flags off:
records:
records list: --limit
records retry: --all --batch
leases:
leases list:
leases break:
dead:
dead list: --limit --oldest
dead show:
dead replay: --all --dry-run --rate
dead purge: --all --dry-run --older-than --yes
"""
"""The commands of 0.2.0, each with its options but --json and --help."""
LAST = {words: options.split() for words, _, options in (line.partition(":") for line in COMMANDS.split("\n") if line)}
NOW = {words: {one for part in command.params for one in part.opts} for words, command in commands()}
NAME = "user_status_cleanup"


def is_answered(words):
    return words in NOW or words in REMOVED_COMMANDS or words.split()[0] in REMOVED_COMMANDS


@every("words", LAST)
def test_each_command_of_the_last_release_works_or_names_the_new_one(words):
    assert is_answered(words)


@every("words, option", [(words, option) for words, options in LAST.items() if words in NOW for option in options])
def test_each_option_of_the_last_release_works_or_says_what_to_do(words, option):
    known = {*REMOVED_OPTIONS, *NEEDLESS_OPTIONS}
    assert option in NOW[words] or f"{words} {option}" in known


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"pause {NAME} --forever", "forgekeeper: `pause` needs no --forever any more: "),
        (f"stop {NAME} --no-wait --reason test", "forgekeeper: `stop` needs no --no-wait any more: "),
        ("flags on bulk_delete_job_artifacts --yes", "forgekeeper: `flags on` needs no --yes any more: "),
        (f"pause {NAME} --until +1h", "forgekeeper: write 1h instead of +1h"),
    ],
)
def test_an_old_form_works_and_one_line_names_the_new_one(main, database, words, said):
    result = main(*words.split())

    (line,) = result.stderr.splitlines()
    assert (result.status, line.startswith(said)) == (0, True)


def test_an_option_that_has_gone_says_what_to_do_and_nothing_is_done(main, database):
    result = main("status", "--watch")

    assert (result.status, result.stdout) == (2, "")
    assert result.complaint == "`status` has no --watch any more: run `watch forgekeeper status`"
