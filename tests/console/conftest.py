"""Start real consoles for tests."""

import time
from urllib.parse import parse_qsl, urlsplit

import pytest

from forgekeeper.cli.console.reading import ANSWER_VALID_SECONDS, NO_ANSWER_SENTENCE
from tests.harness.console import Console
from tests.harness.ports import free_ports
from tests.harness.programs import eventually


@pytest.fixture
def console(database, tmp_path):
    """Start consoles with *settings*, wait until each is ready, and end them after the test."""
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
    """The consoles that the tests of a file share, by their settings."""
    started = {}
    yield started
    for one in started.values():
        one.kill()


@pytest.fixture
def shared(database, consoles, tmp_path_factory):
    """Return the file's console with *settings*; the first call starts it."""

    def find(**settings):
        known = tuple(settings.items())
        if known not in consoles:
            (port,), folder = free_ports(1), tmp_path_factory.mktemp("console")
            words = ("-m", "forgekeeper.cli", "console")
            consoles[known] = Console(folder / "log", *words, console_port=port, cwd=folder, **settings)
            eventually(consoles[known].ready)
        return consoles[known]

    return find


ASKED = {}


@pytest.fixture
def seen(shared):
    """Request a page of the file's console, after its cached answer of the last request has expired.

    On a busy machine a page may be shown before the servers answer.  Then it is requested again, as browsers do.
    """

    def ask(path, **settings):
        console, asked = shared(**settings), urlsplit(path)
        # Parameters without a value do not change the query.
        question = (console.url, asked.path, *sorted(parse_qsl(asked.query)))
        expired = ASKED.get(question, 0.0) + ANSWER_VALID_SECONDS
        time.sleep(max(0.0, expired - time.monotonic()))
        while NO_ANSWER_SENTENCE in (answer := console.get(path)).text:
            pass
        ASKED[question] = time.monotonic()
        return answer

    return ask
