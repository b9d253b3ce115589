"""Charts are SVG that says in words what it shows, and escapes what it is given."""

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree as ET

import pytest

from forgekeeper.console import drawing

EVIL = '"><script>alert(1)</script>'
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def read(svg):
    return ET.fromstring(svg)


def test_a_line_is_broken_where_nothing_was_known():
    path = read(drawing.sparkline([0, 10, None, 5], 90, 20, "Backlog")).find("path").get("d")

    assert path == "M0.0 19.0h0L30.0 1.0M90.0 10.0h0"


@pytest.mark.parametrize("points", [[], [None], [0, 0]])
def test_a_line_of_nothing_is_drawn_too(points):
    assert read(drawing.sparkline(points, 90, 20, "Backlog")).find("title").text == "Backlog"


def test_each_tick_of_a_strip_is_a_link_that_says_its_state_and_the_keyboard_passes_over():
    (link,) = read(drawing.strip([drawing.Tick("failed", "/runs/7", "12:00 failed")])).findall("a")

    assert (link.get("href"), link.get("aria-label"), link.get("tabindex")) == ("/runs/7", "12:00 failed", "-1")


def test_ticks_that_ended_well_and_badly_differ_in_shape():
    ticks = [drawing.Tick(state, "/runs/7", state) for state in ("succeeded", "failed", "skipped", "missed", "started")]

    assert len({link.find("path").get("d") for link in read(drawing.strip(ticks)).findall("a")}) == len(ticks)


def test_the_largest_value_is_the_highest_column():
    heights = [
        float(one.get("height")) for one in read(drawing.columns([1, 4, 2], "Deleted", list("abc"))).iter("rect")
    ]

    assert heights == [20, 80, 40]


def test_a_column_leads_to_its_link():
    (link,) = read(drawing.columns([3], "Deleted", ["3 records"], ["/runs/7"])).findall("a")

    assert (link.get("href"), link.get("aria-label")) == ("/runs/7", "3 records")


def test_what_began_later_stands_further_right_and_what_lasts_yet_reaches_the_end():
    rows = [
        ("first", NOON, NOON + timedelta(minutes=4), "succeeded"),
        ("second", NOON + timedelta(minutes=2), None, "started"),
    ]
    places = [
        (float(one.get("x")), float(one.get("width"))) for one in read(drawing.spans(rows, "Children")).iter("rect")
    ]

    assert places == [(0, 640), (320, 320)]


@pytest.mark.parametrize(
    "drawn",
    [
        drawing.sparkline([1], 9, 9, EVIL),
        drawing.strip([drawing.Tick(EVIL, EVIL, EVIL)], EVIL),
        drawing.columns([1], EVIL, [EVIL], [EVIL], [EVIL]),
        drawing.columns([1], EVIL, [EVIL]),
        drawing.spans([(EVIL, NOON, None, EVIL)], EVIL),
    ],
)
def test_text_is_escaped_wherever_it_stands(drawn):
    assert "<script>" not in drawn
    assert read(drawn).tag == "svg"
