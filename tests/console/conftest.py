"""A real console for each test."""

from itertools import count

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


@pytest.fixture(scope="module")
def consoles():
    """Hold the console that the tests of a file share; the first that needs it starts it."""
    started = []
    yield started
    for one in started:
        one.kill()


ASKED = count(1)


@pytest.fixture
def seen(database, consoles, tmp_path_factory):
    """Ask the console of the file for a page; each time anew, so that no answer is one of the test before."""
    if not consoles:
        (port,), folder = free_ports(1), tmp_path_factory.mktemp("console")
        consoles.append(Console(folder / "log", "-m", "forgekeeper.cli", "console", console_port=port, cwd=folder))
        eventually(consoles[0].ready)
    return lambda path: consoles[0].get(f"{path}{'&' if '?' in path else '?'}anew={next(ASKED)}")
