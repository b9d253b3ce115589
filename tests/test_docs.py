"""The documents say what the code does."""

import ast
import re
from pathlib import Path

import typer

from forgekeeper.batches import BATCHES
from forgekeeper.boot import load
from forgekeeper.cli import batches, metrics
from forgekeeper.cli.commands import application
from forgekeeper.cli.settings import page
from forgekeeper.settings.reading import describe
from tests.harness.catalogue import METRICS
from tests.harness.every import every

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_page_of_settings_is_what_the_declarations_print():
    assert (ROOT / "docs" / "settings.md").read_text() == page(describe(load()))


def test_the_page_of_metrics_is_what_the_catalogue_prints():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.page(METRICS)


def test_the_page_of_batches_is_what_the_declarations_print():
    settings = load()

    found = [batches.described(batch, settings) for batch in BATCHES.values()]

    assert (ROOT / "docs" / "batches.md").read_text() == batches.page(found)


def test_every_command_whose_statuses_are_explained_is_one():
    named = re.findall(r"^\| `([a-z]+)", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)

    assert named
    assert set(named) <= set(typer.main.get_command(application()).commands)


@every("page", PAGES)
def test_every_link_between_pages_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())

    missing = [link for link in links if not (page.parent / link).exists()]

    assert missing == []


@every("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|lua|md|sql))`", page.read_text())

    missing = [path for path in paths if not (ROOT / path).exists()]

    assert missing == []


@every("batch", BATCHES)
def test_every_batch_has_a_page(batch):
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "batches").glob("*.md"))

    assert f"`{batch}`" in pages


def test_every_test_that_the_page_of_promises_names_exists():
    lines = re.findall(r"^\| (.+) \| `(\S+)::(\w+)` \|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)

    missing = [f"{file}::{test}" for _promise, file, test in lines if test not in functions(ROOT / "tests" / file)]

    assert (missing, 40 <= len(lines) <= 60) == ([], True)


def functions(file):
    """Return the names of the functions of a file that exists."""
    found = ast.parse(file.read_text()).body if file.exists() else []
    return {one.name for one in found if isinstance(one, ast.FunctionDef)}
