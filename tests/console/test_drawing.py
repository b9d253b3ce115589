"""Charts are SVG that says in words what it shows, and escapes what it is given."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from jinja2 import Environment, PackageLoader

from forgekeeper.console import drawing
from forgekeeper.console.words import FILTERS

EVIL = '"><script>alert(1)</script>'
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)

TEMPLATES = Environment(
    loader=PackageLoader("forgekeeper.console"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.filters.update(FILTERS)


def drawn(name, *given):
    return ET.fromstring(str(getattr(TEMPLATES.get_template("charts.html").module, name)(*given)))


def run(state, tick=NOON):
    return SimpleNamespace(id=7, tick=tick, state=state, reason=None)


@pytest.mark.parametrize(
    ("points", "path"), [([0, 10, None, 5], "M0.0 19.0h0L30.0 1.0M90.0 10.0h0"), ([], "M0 0"), ([None], "M0 0")]
)
def test_a_line_is_broken_where_nothing_was_known(points, path):
    assert drawing.line(points, 90, 20) == path


def test_ticks_are_links_that_differ_in_shape_and_that_the_keyboard_passes_over():
    states = ["succeeded", "failed", "skipped", "missed", "started", "coalesced"]
    links = [drawn("strip", [run(state)], "Ticks").find("a") for state in states]

    assert [link.get("aria-label") for link in links] == [f"11-20 12:00 {state}" for state in states]
    assert {(link.get("href"), link.get("tabindex")) for link in links} == {("/runs/7", "-1")}
    assert len({link.find("path").get("d") for link in links}) == len(states)


def test_the_largest_value_is_the_highest_column():
    svg = drawn("columns", [(run("succeeded", None), value, "so many") for value in (1, 4, 2)], "Deleted")

    assert [float(one.get("height")) for one in svg.iter("rect")] == [20, 80, 40]
    assert {link.get("aria-label") for link in svg.iter("a")} == {"run 7, by hand, succeeded: so many"}


def test_what_began_later_stands_further_right_and_what_lasts_yet_reaches_the_end():
    minutes = timedelta(minutes=2)
    rows = [("first", "done", NOON, NOON + 2 * minutes), ("second", "started", NOON + minutes, None)]

    assert drawing.spans(rows) == [("first", "done", 0, 640), ("second", "started", 320, 320)]


@pytest.mark.parametrize(
    ("name", "given"),
    [("sparkline", (EVIL, 9, 9)), ("strip", ([run(EVIL)],)), ("columns", ([(run(EVIL), 1, EVIL)],)),
     ("spans", ([(EVIL, EVIL, 0, 1)],))],
)  # fmt: skip
def test_text_is_escaped_wherever_it_stands(name, given):
    assert "<script>" not in ET.tostring(drawn(name, *given, EVIL)).decode()
