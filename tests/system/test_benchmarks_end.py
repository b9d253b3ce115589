"""Benchmarks run to their end; how fast anything is, is none of a test's business."""

import json
import subprocess
import sys

import pytest

from .service import ROOT

NAMES = (
    *("messages", "observed", "audit", "audit_people", "audit_processor"),
    *("audit_lookup", "audit_lookup_twenties", "audit_lookup_tens", "audit_lookup_ones"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_to_its_end_and_writes_its_figures(tmp_path, name):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", name, "--scale", "0.01", "--rounds", "1", "--json", str(file)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["benchmarks"][name]
    assert [len(figures["ours"]), *(len(peer["figures"]) for peer in figures["peers"].values())] == [
        1,
        *[1] * len(figures["peers"]),
    ]
