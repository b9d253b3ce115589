"""Every alert leads to a runbook that says what to look at, what to do, and when it is over."""

import re
from pathlib import Path

import peewee
import pytest

from tests.harness.every import every
from tests.harness.rules import RULES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.name: page.read_text() for page in sorted((DOCS / "runbooks").glob("*.md"))}
ALERTS = [rule for rule in RULES if "alert" in rule]
BASE = "https://forgekeeper.example/docs/runbooks/"


@every("rule", ALERTS, name=lambda rule: rule["alert"])
def test_every_alert_leads_to_its_part_of_a_runbook(rule):
    page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(BASE).partition("#")

    assert anchor == rule["alert"].lower()
    assert re.search(rf"^## {rule['alert']}\n\S", PAGES[page], re.MULTILINE)


@every("name", PAGES)
def test_every_runbook_says_what_to_look_at_what_to_do_and_when_it_is_over(name):
    parts = re.findall(r"^## (.+)\n(?:\n)?(\S)", PAGES[name], re.MULTILINE)

    assert [part for part, _ in parts[-3:]] == ["Look", "Fix", "Over when"]


def test_no_runbook_is_about_an_alert_that_is_gone():
    parts = [part for page in PAGES.values() for part in re.findall(r"^## (.+)$", page, re.MULTILINE)]

    assert sorted(set(parts) - {"Look", "Fix", "Over when"}) == sorted({rule["alert"] for rule in ALERTS})


def test_every_query_of_the_runbooks_is_answered(database):
    queries = [
        (name, query)
        for name, page in PAGES.items()
        for query in (*re.findall(r'psql -c "([^"]+)"', page), *re.findall(r"`(select [^`]+ from [^`]+)`", page))
    ]

    for name, query in queries:
        try:
            database.execute_sql(query.replace("BATCH", "prune").replace("PROJECT", "1").replace("%", "%%"))
        except peewee.PeeweeException as error:
            pytest.fail(f"{name}: {query}: {error}")
    assert len(queries) >= 20


def test_the_page_of_alerts_lists_them():
    rows = [
        f'| <a id="{rule["alert"]}"></a>[`{rule["alert"]}`]({"runbooks/" + rule["annotations"]["runbook_url"].removeprefix(BASE)})'
        f" | {rule['labels']['severity']} | {rule['labels']['team']}"
        f" | {rule.get('for', 'at once')} | {rule['annotations']['summary']} |"
        for rule in ALERTS
    ]

    assert [line for line in (DOCS / "alerts.md").read_text().splitlines() if line.startswith("| <a id")] == rows
