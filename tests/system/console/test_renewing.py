"""A page that is open renews itself while it can be seen, and keeps what a person does on it."""

import re
from datetime import timedelta

import pytest
from playwright.sync_api import expect

from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.quarantine import Quarantined
from tests.harness.waiting import scale_timeout
from tests.system.proxy import postgres_through, redis_through

from .browser import NARROW, SEEN, console_in

FORM = """
    <details><summary>More</summary><label>Chosen <input type="checkbox" name="chosen"></label>
    <label>Reason <input name="reason"></label> <a id="last" href="#main">Last</a></details>
"""
KEPT = """() => [
    document.querySelector("details").open, document.querySelector("[name=chosen]").checked,
    document.querySelector("[name=reason]").value, document.activeElement.id,
    document.querySelector("#live .scroll").marked === true, scrollY,
]"""
QUIET = 1_500
"""Milliseconds in which a page that is seen asks twice at least."""


@pytest.fixture
def proxies(urls):
    """Proxies before the servers, and the settings that lead through them."""
    (postgres, database_url), (redis, redis_url) = postgres_through(urls.database), redis_through(urls.redis)
    with postgres, redis:
        yield {
            "PostgreSQL": postgres,
            "Redis": redis,
            "settings": {"database_url": database_url, "redis_url": redis_url},
        }


@pytest.fixture
def console(database, proxies, tmp_path):
    with console_in(tmp_path, **proxies["settings"]) as one:
        yield one


def test_a_page_asks_one_question_at_a_time_however_often_it_is_shown_again(window):
    looking = window().sign_in("ada")
    page = looking.open("/")
    for state in ("hidden", "visible") * 5:
        page.evaluate(SEEN, state)
    before = len(looking.requests)

    page.wait_for_timeout(3_000)

    assert 2 <= len(looking.requests) - before <= 6


def test_a_page_that_nobody_can_see_asks_nothing_and_asks_at_once_when_it_is_shown_again(window):
    looking = window().sign_in("ada")
    page = looking.open("/")
    page.wait_for_timeout(QUIET)
    page.evaluate(SEEN, "hidden")
    page.wait_for_timeout(QUIET)
    hidden = len(looking.requests)
    page.wait_for_timeout(QUIET)

    assert len(looking.requests) == hidden
    with page.expect_request("**/", timeout=400):
        page.evaluate(SEEN, "visible")


def test_a_page_keeps_what_a_person_does_on_it_while_it_renews_itself(window):
    looking = window(width=NARROW).sign_in("ada")
    looking.page.route("**/processes", _with_a_form)
    page = looking.open("/processes")
    page.click("summary")
    page.check("[name=chosen]")
    page.fill("[name=reason]", "half a sen")
    page.keyboard.press("Tab")
    page.evaluate("() => { document.querySelector('#live .scroll').marked = true; scrollTo(0, 60); }")

    Process.record_heartbeat(
        None, kind="worker", host="new", pid=1, version="1", dead_after=timedelta(hours=1), facts={"queues": []}
    )
    page.get_by_text("new:1").wait_for()

    assert page.evaluate(KEPT) == [True, True, "half a sen", "last", True, 60]


def test_what_is_chosen_stays_chosen_when_another_row_goes(window):
    for key in ("first", "second", "third"):
        quarantine.record_failure("git_ref_cleanup", "clean_project_refs", key, f"of the {key}", reason="child_failed")
    page = window().sign_in("ada").open("/quarantine")
    page.locator("tr").filter(has_text="of the second").locator("[name=id]").check()

    Quarantined.delete().where(Quarantined.key == "first").execute()
    page.get_by_text("of the first").wait_for(state="detached")

    assert page.locator("tr").filter(has=page.locator("[name=id]:checked")).all_inner_texts() == [
        page.locator("tr").filter(has_text="of the second").inner_text()
    ]


def _with_a_form(route):
    """Let what is live have fields, which no page has to have."""
    answer = route.fetch()
    route.fulfill(response=answer, body=answer.text().replace("</h1>", f"</h1>{FORM}"))


def test_a_page_says_within_two_seconds_that_the_console_is_away_and_comes_back_by_itself(window, console):
    page = window(allowed="Failed to load|htmx").sign_in("ada").open("/")
    lost = page.locator("#lost")
    page.wait_for_timeout(QUIET)

    console.end()
    lost.wait_for(state="visible", timeout=2_000)
    console.start()

    lost.wait_for(state="hidden")


def silent(proxy):
    proxy.black_hole()


def gone(proxy):
    proxy.refuse()
    proxy.cut()


@pytest.mark.parametrize("server", ["PostgreSQL", "Redis"])
@pytest.mark.parametrize("leave", [silent, gone])
def test_a_page_says_within_two_seconds_that_a_server_is_away_and_comes_back_by_itself(window, proxies, server, leave):
    page = window(allowed="Failed to load").sign_in("ada").page
    page.wait_for_timeout(QUIET)
    says = page.locator(".trouble").filter(
        has_text=re.compile(f"{server}.*away|{server}.*not|cannot use {server}|connect")
    )
    # On a busy machine a server may seem to be away for a moment.
    expect(says).to_have_count(0, timeout=scale_timeout(10.0) * 1_000)

    leave(proxies[server])
    says.first.wait_for(timeout=scale_timeout(2.0) * 1_000)
    proxies[server].passing()

    says.first.wait_for(state="detached")
