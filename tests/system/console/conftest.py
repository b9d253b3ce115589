"""Debian's Chromium, and the console in it: whatever a page asks of another host, or complains of, fails the test."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.harness.programs import ROOT

from .browser import OPTIONS, Window

AXE = ROOT / ".venv/browser/node_modules/axe-core/axe.min.js"


def needed(program, how):
    """Skip a test that cannot be made without a program, and fail where everything has to be made."""
    sentence = f"{program} is not here: {how}"
    if os.environ.get("CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="module")
def chromium():
    """Chromium, started once for the tests of a file."""
    program = shutil.which("chromium") or needed("Chromium", "apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe():
    """The program that finds what keeps people from using a page."""
    if not AXE.exists():
        needed("axe-core", "make .venv/.browser")
    return AXE.read_text()


@pytest.fixture
def window(console, chromium):
    """Open windows on the console of a test; in the end none of their pages may have complained."""
    opened = []

    def look(**options):
        opened.append(Window(chromium, console, **options))
        return opened[-1]

    yield look
    for one in opened:
        one.close()
    assert [sentence for one in opened for sentence in one.wrong] == []
