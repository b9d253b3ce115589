"""A real console for each test."""

import pytest

from tests.harness.console import Console
from tests.harness.ports import free_ports
from tests.harness.programs import eventually


@pytest.fixture
def console(database, tmp_path):
    """Start consoles with *settings*; each is ready, and ended after the test."""
    started = []

    def start(**settings):
        (port,) = free_ports(1)
        log = tmp_path / f"console-{len(started)}.log"
        one = Console(log, "-m", "forgekeeper.cli", "console", console_port=port, cwd=tmp_path, **settings)
        started.append(one)
        eventually(one.ready)
        return one

    yield start
    for one in started:
        one.kill()
