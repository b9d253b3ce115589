"""What the pages say is there: links, files, commands, settings, metrics, batches."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

from typer import Exit
from typer._click.exceptions import ClickException, MissingParameter
from typer.main import get_command

import forgekeeper
from forgekeeper.api.batches import BATCHES
from forgekeeper.cli import contract
from forgekeeper.cli.commands import build_application
from forgekeeper.delivery import boot
from forgekeeper.platform.settings import PREFIX
from forgekeeper.platform.settings.reading import list_settings
from forgekeeper.platform.settings.secret_files import FILE_SUFFIX, list_secret_settings
from metrics.catalogue import select_metrics
from tests.harness import public_names
from tests.harness.catalogue import METRICS
from tests.harness.every import every
from tests.harness.thorough import whole_only
from tests.harness.toys import forget_declarations
from tests.mutation.promises import read_breaches
from tests.system.forges import facts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "README.ja.md", "CONTRIBUTING.md", "deploy/systemd/README.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
PRESENT = [page for page in PAGES if page.parent.name != "adr"]
"""Pages about what is; decisions also name what was."""
ENGLISH = [page for page in PRESENT if DOCS / "ja" not in page.parents and page.name != "README.ja.md"]
"""Pages with an English first sentence; test_japanese_pages.py has the check of the others."""
GIVEN = {
    "BATCH": "prune",
    "TIME": "+2h",
    "REASON": "'a reason'",
    "ID": "1",
    "N": "1",
    "RUN": "1",
    "FLAG": "a",
    "...": "x",
}
"""What a reader puts in for a word in capitals."""


def anchors(page):
    """Name the headings of a page as GitHub does, and what has an id."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def commands(page):
    """List the page's commands of ours: lines of its blocks, and what stands between backquotes elsewhere."""
    text = page.read_text()
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"^(\$ |\S+=\S+ )", "", line.strip()) for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = [re.sub(r"^\S+=\S+ ", "", line) for line in (*lines, *spans)]
    return [re.split(r"\s+[|>#]|;", line)[0] for line in found if re.match(r"forgekeeper\s+[a-z]", line)]


@cache
def whole():
    return get_command(build_application())


def parse(line):
    """Have the command line parse what a page says, as it would for a reader; nothing is done."""
    for word, given in GIVEN.items():
        line = re.sub(rf"(?<![\w-]){re.escape(word)}…?(?!\w)", given, line)
    words = shlex.split(line.replace("…", "x"))[1:]
    command, parent = whole(), None
    while True:
        context = command.make_context("forgekeeper", list(words), parent=parent, resilient_parsing=False)
        rest = [*context._protected_args, *context.args]
        if not (hasattr(command, "commands") and rest):
            return
        parent, (_name, command, words) = context, command.resolve_command(context, rest)


def rows(page):
    """List the rows of the page's tables, without their headings."""
    return [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]


def row(name, *cells):
    return f"| `{name}` | {' | '.join(cells)} |"


def code(words):
    return ", ".join(f"`{word}`" for word in words)


def test_the_page_of_settings_has_each_as_it_is_declared():
    assert rows("settings.md") == [
        row(one.name, one.type.replace("|", "or"), code([one.default] if one.default else []), one.sentence)
        for one in list_settings(boot.load_settings())
    ]


def test_the_page_of_metrics_has_each_as_it_is_declared_and_all_values_of_its_labels():
    labels = {}
    for label, values in (each for one in METRICS.values() for each in one.values.items()):
        labels.setdefault(label, {}).update(dict.fromkeys(values or ()))

    metrics = (one for process in ("worker", "scheduler", "exporter") for one in select_metrics(process, METRICS))
    assert rows("metrics.md") == [
        *(row(one.name, one.type, code(one.labels), one.unit, one.help) for one in metrics),
        *(row(label, code(values) or "as configured") for label, values in labels.items()),
    ]


def test_the_page_of_the_contract_is_what_the_command_prints():
    assert (DOCS / "contract.md").read_text().splitlines() == list(contract.list_page_lines(BATCHES.values()))


@every("page", [*ENGLISH, ROOT / "SECURITY.md", DOCS / "adr" / "README.md"])
def test_every_page_begins_with_its_kind_and_its_readers(page):
    kinds = "a tutorial|a how-to|a reference|an explanation"

    assert re.match(rf"# .+\n\nThis page is (?:{kinds})\b.* for ", page.read_text())


@every("page", PAGES)
def test_every_link_between_pages_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())

    missing = [
        (path, anchor)
        for path, anchor in links
        if not (target := page.parent / path if path else page).exists() or (anchor and anchor not in anchors(target))
    ]

    assert missing == []


@every("page", PRESENT)
def test_every_file_that_a_page_names_exists(page):
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|lua|md|sql|yml))`", page.read_text())

    missing = [path for path in paths if not (ROOT / path).exists()]

    assert missing == []


@every("page", PRESENT)
def test_every_command_that_a_page_names_is_one(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    wrong = []
    for line in commands(page):
        try:
            parse(line)
        except (Exit, MissingParameter):  # it asks for help; a sentence may name a command without what it needs
            continue
        except (ClickException, ValueError) as error:
            wrong.append((line, str(error)))

    assert wrong == []


@every("page", PRESENT)
def test_every_setting_that_a_page_names_is_one(page):
    model = boot.settings_class()
    settings = {PREFIX + field.upper() for field in model.model_fields}
    settings |= {PREFIX + field.upper() + FILE_SUFFIX for field in list_secret_settings(model)}

    named = re.findall(rf"{PREFIX}[A-Z_]+[A-Z](?!_?(?:\.\.\.|…|<|_))\b", page.read_text())

    assert {one for one in named if one not in settings} - {f"{PREFIX}CRON_STALE_PIPELINES"} == set()


@every("page", PRESENT)
def test_every_metric_that_a_page_names_is_one(page):
    named = re.findall(r"\bforgekeeper_\w+_(?:total|seconds|records|messages)\b", page.read_text())

    assert {one for one in named if one not in METRICS} == set()


def functions(file):
    """Return the names of the functions of a file that exists."""
    found = ast.parse(file.read_text()).body if file.exists() else []
    return {one.name for one in found if isinstance(one, ast.FunctionDef)}


@every("page, least, most", [("promises", 100, 250), ("architecture/negative_proofs", 20, 30)])
def test_every_test_that_the_page_of_promises_or_of_negative_proofs_names_exists(page, least, most):
    lines = re.findall(r"^\| (.+) \| `(\S+)::(\w+)` \|$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)

    missing = [f"{file}::{test}" for _promise, file, test in lines if test not in functions(ROOT / "tests" / file)]

    assert (missing, least <= len(lines) <= most) == ([], True)


@whole_only
def test_every_promise_has_a_breach_of_a_line_that_its_file_has_once():
    breaches = list(read_breaches(ROOT))

    assert [breach.mutant.diff() for breach in breaches if not breach.mutant.is_one()] == []


@every("batch", BATCHES)
def test_every_batch_has_a_page(batch):
    assert f"`{batch}`" in "".join(page.read_text() for page in (DOCS / "batches").glob("*.md"))


def test_the_page_of_public_names_is_written_from_their_docstrings():
    assert public_names.PAGE.read_text() == public_names.write_page()


def test_there_are_thirty_public_names_at_most():
    assert len(public_names.name_all()) <= 30


@every("name", public_names.name_all())
def test_the_example_of_every_public_name_works(name):
    example = public_names.read_contract(name)[1]
    names = {one: getattr(forgekeeper, one) for one in public_names.name_all()} | {"__name__": "examples"}

    assert example
    with forget_declarations():
        exec(compile(public_names.MODELS + example, name, "exec"), names)


def test_the_page_of_forges_has_the_facts_that_each_forge_states():
    assert "\n".join(facts()) in (DOCS / "forges.md").read_text()
