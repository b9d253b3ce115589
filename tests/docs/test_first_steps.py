"""Every command of docs/first_steps.md runs as printed, in its order, and shows what the page says.

tests/system/test_readme_installation.py runs commands that install packages, which takes minutes.
"""

import re
import sys
from pathlib import Path

from forgekeeper.platform.settings import PREFIX
from tests.harness.readme import WORKER_READY, free_addresses, require_success
from tests.harness.shell import Terminal
from tests.harness.thorough import whole_only

PAGE = (Path(__file__).parents[2] / "docs" / "first_steps.md").read_text()
INSTALLATION = [
    "git clone https://github.com/forgekeeper/forgekeeper",
    "cd forgekeeper",
    "python3 -m venv .venv",
    ".venv/bin/pip install '.[embedded,console]'",
]
SETTINGS = {f"{PREFIX}WORKER_PROCESSES": "1", f"{PREFIX}CRON_GIT_REF_CLEANUP": "*/5 * * * * *"}
"""One process starts faster, and a run every five seconds saves the wait for a full minute."""
WAIT_FOR_A_RUN = (
    "until forgekeeper ticks git_ref_cleanup | grep -q 'children_deleted=[1-9]'; do sleep 0.2; done",
    # From the audit: a child that begins late counts towards the next run of its batch, which is seconds away here.
    "RUN=$(forgekeeper audit --limit 10000 | grep -oP 'git_ref_cleanup \\(run \\K\\d+' | head -1)",
)


def read_steps():
    """Return the commands of each step, by its number."""
    steps = re.findall(r"^## (\d)\. .*\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    return {int(number): re.findall(r"^(?!```)(.+)$", "".join(blocks(text)), re.MULTILINE) for number, text in steps}


def blocks(text):
    return re.findall(r"^```\n((?:.*\n)*?)```$", text, re.MULTILINE)


STEPS = read_steps()
STOP, UNDO, RESUME = 5, 6, 7


def follow(steps, exported):
    """Return a script for the second terminal: the line that `up` prints, and the commands of the steps."""
    run = [line.replace("RUN", '"$RUN"') for number in steps for line in STEPS[number]]
    return "\n".join(["set -e", exported, *run[:3], *WAIT_FOR_A_RUN, *run[3:]])


def test_the_page_begins_with_the_commands_of_an_installation():
    assert STEPS[1] == [*INSTALLATION, ".venv/bin/forgekeeper up --sample"]


@whole_only
def test_a_reader_sees_a_preview_and_a_run_stops_the_batch_and_restores_its_refs(tmp_path):
    (tmp_path / ".venv").symlink_to(sys.prefix)
    with Terminal(tmp_path, free_addresses() | SETTINGS) as terminal:
        up = terminal.start(STEPS[1][-1])
        assert up.wait_for_output(WORKER_READY), up.read_output()
        (exported,) = re.findall(r"^export .+$", up.read_output(), re.MULTILINE)

        second = terminal.start(follow((2, 3, 4, STOP, UNDO, RESUME), exported))

        require_success(second, 120)
        said = second.read_output()
        up.interrupt()
        require_success(up, 120)
        assert re.search(r"^([1-9]\d*) of \1 could be restored$", said, re.MULTILINE), said
        assert re.search(r"^([1-9]\d*) of \1 were restored$", said, re.MULTILINE), said
        assert "git_ref_cleanup is stopped until" in said
        assert "git_ref_cleanup runs again from its next tick" in said
        assert terminal.leaves_no_process()
