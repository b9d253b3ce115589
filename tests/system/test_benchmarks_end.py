"""Benchmarks run to their end; how fast anything is, is none of a test's business."""

import json
import subprocess
import sys

import pytest

from .service import ROOT


@pytest.mark.parametrize("name", ["messages", "metrics", "logs", "both"])
def test_a_benchmark_runs_to_its_end_and_writes_its_figures(tmp_path, name):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", name, "--scale", "0.01", "--rounds", "1", "--json", str(file)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())[name]
    assert (len(figures["ours"]), len(figures["peers"]), figures["ratio"] > 0) == (1, 1, True)
