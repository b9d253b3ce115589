"""A page that is open renews itself while it can be seen, and keeps what a person does on it."""

import pytest

from .browser import SEEN, console_in

QUIET = 1_500
"""Milliseconds in which a page that is seen asks twice at least."""


@pytest.fixture
def console(database, tmp_path):
    with console_in(tmp_path) as one:
        yield one


def test_a_page_asks_one_question_at_a_time_however_often_it_is_shown_again(window):
    looking = window().sign_in("ada")
    page = looking.open("/")
    for state in ("hidden", "visible") * 5:
        page.evaluate(SEEN, state)
    before = len(looking.asked)

    page.wait_for_timeout(3_000)

    assert 2 <= len(looking.asked) - before <= 6


def test_a_page_that_nobody_can_see_asks_nothing_and_asks_at_once_when_it_is_shown_again(window):
    looking = window().sign_in("ada")
    page = looking.open("/")
    page.wait_for_timeout(QUIET)
    page.evaluate(SEEN, "hidden")
    page.wait_for_timeout(QUIET)
    hidden = len(looking.asked)
    page.wait_for_timeout(QUIET)

    assert len(looking.asked) == hidden
    with page.expect_request("**/", timeout=400):
        page.evaluate(SEEN, "visible")


def test_a_page_says_within_two_seconds_that_the_console_is_away_and_comes_back_by_itself(window, console):
    page = window(allowed="Failed to load|htmx").sign_in("ada").open("/")
    lost = page.locator("#lost")
    page.wait_for_timeout(QUIET)

    console.end()
    lost.wait_for(state="visible", timeout=2_000)
    console.start()

    lost.wait_for(state="hidden")
