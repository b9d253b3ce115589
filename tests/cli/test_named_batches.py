"""`FORGEKEEPER_BATCHES` alone says which batches there are, also where files of the user's have our names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.thorough import whole_only

ROOT = Path(__file__).parents[2]
OF_THE_USER = "raise RuntimeError('it was imported')\n"
MINE, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "writing_a_batch.md").read_text(), re.DOTALL)


@pytest.fixture
def named(tmp_path):
    """Run a command in a folder that has a batch of the user's, and modules of our names; return what it printed."""
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("models", "workers"):
        (tmp_path / f"{name}.py").write_text(OF_THE_USER)

    def run(*words, batches="mine"):
        done = subprocess.run(
            [sys.executable, "-c", "from forgekeeper.cli import main; main()", *words],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "FORGEKEEPER_BATCHES": batches},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@whole_only
def test_the_commands_know_the_named_batches_alone(named):
    status, printed, complaint = named("batches")

    assert (status, complaint) == (0, "")
    assert "stale_pipelines" in printed
    assert "user_status_cleanup" not in printed


@whole_only
def test_no_help_imports_what_no_setting_names(named):
    status, printed, complaint = named("--help", batches="no_such_module")

    assert (status, complaint) == (0, "")
    assert "seed" in printed
