"""Benchmarks run to their end; how fast anything is, is none of a test's business."""

import json
import subprocess
import sys

import pytest

from benchmarks.__main__ import NOWHERE, declared
from tests.harness.programs import ROOT

SCALE = "0.01"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Run all once, in little, with one round; return what each came to."""
    file = tmp_path_factory.mktemp("benchmarks") / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--scale", SCALE, "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    return json.loads(file.read_text())["benchmarks"]


@pytest.mark.parametrize("name", declared(NOWHERE, float(SCALE)))
def test_a_benchmark_runs_to_its_end_and_has_figures_or_says_what_is_missing(figures, name):
    found = figures[name]

    assert found.get("failed") is None
    if "missing" not in found:
        assert len(found["ours"]) == 1
        assert all("missing" in peer or len(peer["figures"]) == 1 for peer in found["peers"].values())
