"""Charts are SVG that says in words what it shows, and escapes what it is given."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from forgekeeper.cli.console import drawing
from forgekeeper.cli.console.template_environments import create_environments

EVIL = '"><script>alert(1)</script>'
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)

TEMPLATES = create_environments()["en"]


def drawn(name, *given):
    return ET.fromstring(str(getattr(TEMPLATES.get_template("charts.html").module, name)(*given)))


def run(state, tick=NOON):
    return SimpleNamespace(id=7, tick=tick, state=state, reason=None)


@pytest.mark.parametrize(
    ("points", "path"), [([0, 10, None, 5], "M0.0 19.0h0L30.0 1.0M90.0 10.0h0"), ([], "M0 0"), ([None], "M0 0")]
)
def test_a_line_is_broken_where_nothing_was_known(points, path):
    assert drawing.draw_line(points, 90, 20) == path


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


def test_the_axes_of_columns_name_the_most_and_both_ends():
    bars = [(run("succeeded", NOON + timedelta(minutes=one)), one, f"{one} deleted") for one in (1, 4, 2)]

    assert [one.text for one in drawn("columns", bars, "Deleted").iter("text")] == [
        "4 deleted",
        "11-20 12:01",
        "11-20 12:02",
    ]


def test_the_axis_of_spans_names_both_ends():
    svg = drawn("spans", [("first", "done", 0, 640)], "Children", NOON, NOON + timedelta(minutes=2))

    assert [one.text for one in svg.iter("text")][1:] == ["2026-11-20 12:00:00", "2026-11-20 12:02:00 UTC"]


def test_a_trend_shows_its_most_and_each_value_on_hover():
    points = [(NOON, 7), (NOON + timedelta(minutes=1), None), (NOON + timedelta(minutes=2), 1_200)]
    trend = drawn("sparkline", points, "Backlog")

    assert trend.find("small").text == "max 1,200"
    assert [rect.find("title").text for rect in trend.iter("rect")] == ["12:00: 7", "12:02: 1,200"]


@pytest.mark.parametrize(
    ("name", "said"), [("sparkline", "no trend yet"), ("strip", "no data yet"), ("columns", "no data yet")]
)
def test_a_chart_without_data_says_so(name, said):
    assert drawn(name, [], "Empty").text == said


def test_what_began_later_stands_further_right_and_what_lasts_yet_reaches_the_end():
    minutes = timedelta(minutes=2)
    rows = [("first", "done", NOON, NOON + 2 * minutes), ("second", "started", NOON + minutes, None)]

    assert drawing.place_spans(rows) == [("first", "done", 0, 640), ("second", "started", 320, 320)]


@pytest.mark.parametrize(
    ("name", "given", "ends"),
    [("sparkline", [(NOON, 1)], ()), ("strip", [run(EVIL)], ()), ("columns", [(run(EVIL), 1, EVIL)], ()),
     ("spans", [(EVIL, EVIL, 0, 1)], (NOON, NOON))],
)  # fmt: skip
def test_text_is_escaped_wherever_it_stands(name, given, ends):
    assert "<script>" not in ET.tostring(drawn(name, given, EVIL, *ends)).decode()
