"""The commands of README.md that install packages run as printed in a fresh clone, and the installation works."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from demo.servers import run_servers
from tests.harness.readme import (
    copy_checkout,
    free_addresses,
    gitlab_at_the_url_of_peek,
    require_console,
    run_commands,
)

INSTALL_TIMEOUT_SECONDS = 900.0
ONE_FILE = {"PYTEST_ADDOPTS": "tests/docs/test_runbooks.py"}
"""Limits `make test` to one file: this test is about the installation, not about the suite."""

pytestmark = pytest.mark.timeout(3 * INSTALL_TIMEOUT_SECONDS)


@pytest.fixture
def checkout(tmp_path):
    """Clone the repository; remove the clone at the end, as it then has an environment of its own."""
    folder = copy_checkout(tmp_path / "forgekeeper")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def path():
    """Return the PATH of a reader: the Python of the tests, without the programs of the tests' environment."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.startswith(sys.prefix)]
    return {"PATH": os.pathsep.join([str(Path(sys.base_prefix) / "bin"), *folders])}


def test_an_installation_from_a_checkout_runs_on_sample_data_and_looks_at_a_forge(checkout, path):
    with run_commands("install", checkout, path, timeout_seconds=INSTALL_TIMEOUT_SECONDS):
        pass
    with run_commands("sample", checkout, path | free_addresses()) as (up,):
        require_console(up)
    with (
        run_servers() as own,
        gitlab_at_the_url_of_peek(own.database_url) as environment,
        run_commands("peek", checkout, path | environment) as (peek,),
    ):
        assert "190 expired_artifact" in peek.read_output()


def test_make_shows_every_batch_at_work_and_runs_the_tests(checkout, path):
    with run_commands("make demo", checkout, path, timeout_seconds=INSTALL_TIMEOUT_SECONDS) as (demo,):
        assert "Every figure is as expected. Servers and data are being removed." in demo.read_output()
    with run_commands("make test", checkout, path | ONE_FILE, timeout_seconds=INSTALL_TIMEOUT_SECONDS) as (tests,):
        assert " passed" in tests.read_output()
