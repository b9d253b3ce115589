"""Pages of metrics as Prometheus reads them, and what its own programs say of our files."""

import os
import shutil
import subprocess
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families


class Scrape(NamedTuple):
    """A page, and what it says."""

    text: str
    samples: dict

    def value(self, name, **labels):
        """The value of a series, None where there is none; the prefix may be left out."""
        return self.samples.get((f"forgekeeper_{name}", frozenset(labels.items())))

    def series(self, name):
        """The values of a metric's series, by their label values."""
        return {
            tuple(value for _, value in sorted(labels)): value
            for (found, labels), value in self.samples.items()
            if found == f"forgekeeper_{name}"
        }

    def labels(self, name):
        """The labels of a metric's series."""
        return [dict(labels) for found, labels in self.samples if found == name]

    @property
    def names(self):
        return {name for name, _ in self.samples}


def read(text):
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Scrape(text, {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})


def ran(program, *arguments, text=None):
    """Run Debian's program, which .ci/run installs; return its status and what it said."""
    if shutil.which(program) is None:
        assert "CI" not in os.environ, f"{program} is missing, and .ci/run should have installed it"
        pytest.skip(f"{program} is not installed (Debian: prometheus, prometheus-alertmanager)")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
