"""What a person does and sees on the console, with a real scheduler and real workers."""

import json
import os
import re

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.acts import Act
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.quarantine import Quarantined
from tests.harness import forks
from tests.harness.many_rows import statuses
from tests.harness.programs import ROOT, eventually
from tests.harness.waiting import scale_timeout

from .browser import console_in, tab_to

BATCH = "user_status_cleanup"
ENVIRONMENT = {f"cron_{name}": "off" for name in BATCHES} | {
    "dead_after": "3",
    "poll_interval": "0.5",
    "pace_user_status_cleanup": "1000",
    "log_format": "json",
}
REASON = "the mail relay is being moved"
MANY = 30
"""So many failures are more than a child is tried again after."""
SOON = 2_000
"""Milliseconds within which a page shows a change."""


@pytest.fixture
def console(database, tmp_path):
    with console_in(tmp_path, **ENVIRONMENT) as one:
        yield one


@pytest.fixture
def command(tmp_path):
    """Run `forgekeeper <arguments> --json`; return what it says."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = forks.run(["-m", "forgekeeper.cli", *words, "--json"], env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def act(name):
    return f"a[href^='/act/{name}?']"


def by_mouse(page):
    page.click(act("pause"))
    page.fill("[name=reason]", REASON)
    page.click("main form button")


def by_keyboard(page):
    tab_to(page, act("pause"))
    page.keyboard.press("Enter")
    page.wait_for_url("**/act/pause?*")
    tab_to(page, "[name=reason]")
    page.keyboard.type(REASON)
    tab_to(page, "main form button")
    page.keyboard.press("Enter")


@pytest.mark.parametrize(("way", "javascript"), [(by_mouse, False), (by_keyboard, True)])
def test_a_pause_with_a_reason_is_in_status_and_in_the_audit(window, command, way, javascript):
    page = window(javascript=javascript).sign_in("ada").open(f"/batches/{BATCH}")

    way(page)
    page.wait_for_url(f"**/batches/{BATCH}*")

    page.locator("#live").get_by_text(REASON).first.wait_for()
    (hold,) = command("status")["batches"][BATCH]["holds"]
    assert (hold["kind"], hold["reason"]) == ("pause", REASON)
    (done,) = Act.select().where(Act.act == "pause")
    assert (done.reason, done.batch) == (REASON, BATCH)
    assert "ada" in done.actor
    line = window(javascript=javascript).sign_in("eve").open("/audit").locator("tr").filter(has_text=REASON)
    assert "ada" in line.first.inner_text()


def test_a_run_sent_from_its_preview_moves_the_numbers_without_a_reload(window, services):
    statuses(8_000)
    services("scheduler", "scheduler", **ENVIRONMENT)
    services("worker", "worker", "--processes", "1", "--threads", "2", **ENVIRONMENT)
    looking = window().sign_in("ada")
    page = looking.open(f"/batches/{BATCH}")

    page.click(act("run"))
    form = page.locator("main")
    assert "8,000" in form.inner_text()
    page.fill("[name=reason]", REASON)
    page.click("main form button")
    eventually(lambda: JobRun.select_newest_first(BATCH).first() is not None)
    page.goto(f"/runs/{JobRun.select_newest_first(BATCH).first().id}")
    pages, numbers = len(asked(looking, "document")), set()

    def moves():
        page.wait_for_timeout(200)
        numbers.update(re.findall(r"deleted\D{0,5}([\d,]+)", page.locator("#live").inner_text(), re.IGNORECASE))
        return len(numbers - {"8,000"}) >= 2

    eventually(moves)
    page.locator("#live .state.succeeded").first.wait_for(timeout=30_000)
    assert "8,000" in page.locator("#live").inner_text()
    assert len(asked(looking, "document")) == pages


def test_a_worker_that_is_killed_is_seen_silent_and_its_run_comes_back_and_ends(window, services):
    statuses(6_000)
    services("scheduler", "scheduler", **ENVIRONMENT)
    first = services("first", "worker", "--processes", "1", "--threads", "2", **ENVIRONMENT)
    looking = window().sign_in("eve")
    page = looking.open("/processes")
    run = JobRun.claim_manual(BATCH, by="a test")
    eventually(lambda: JobRun.get_by_id(run).state == "started")

    worker = page.locator("#live tr").filter(has_text=JobRun.get_by_id(run).started_by).filter(has_text="worker")
    worker.locator(".state.alive").wait_for()

    first.kill()
    worker.locator(".state.silent").wait_for()
    services("second", "worker", "--processes", "1", "--threads", "2", **ENVIRONMENT)
    page.goto(f"/runs/{run}")

    page.locator("#live .state.succeeded").first.wait_for(timeout=30_000)
    assert JobRun.get_by_id(run).losses == 1


def test_what_lies_in_quarantine_is_retried(window):
    for _ in range(MANY):
        quarantine.record_failure(
            "git_ref_cleanup", "clean_project_refs", "7", "a lock is there", reason="child_failed"
        )
    page = window().sign_in("ada").open("/quarantine")
    assert Quarantined.get().next_retry_at is None

    page.locator("tr").filter(has_text="a lock is there").locator("[name=id]").check()
    page.get_by_role("button", name="Retry the chosen").click()
    page.fill("[name=reason]", "the lock is gone")
    page.click("main form button")
    page.wait_for_url(lambda url: "/act/" not in url)

    assert Quarantined.get().next_retry_at is not None
    assert Act.get(Act.act == "quarantine retry").reason == "the lock is gone"


def test_a_viewer_sees_no_buttons_and_what_is_sent_by_hand_is_refused(window, console):
    looking = window(allowed="403").sign_in("eve")
    for path in ("/", f"/batches/{BATCH}", "/quarantine", "/flags"):
        assert looking.open(path).locator("a[href^='/act/'], form[action^='/act/']").count() == 0
    fields = {"batch": BATCH, "reason": REASON}

    by_hand = looking.context.request.post("/act/pause", form=fields, headers={"Origin": console.url})
    by_script = looking.page.evaluate(
        "fields => fetch('/act/pause', {method: 'POST', body: new URLSearchParams(fields)}).then(got => got.status)",
        fields,
    )

    assert (by_hand.status, by_script, Hold.list_active()) == (403, 403, [])


@pytest.mark.parametrize("path", ["/", f"/batches/{BATCH}"])
def test_a_change_is_seen_within_two_seconds(window, path):
    page = window().sign_in("eve").open(path)
    page.wait_for_timeout(500)

    Hold.add(BATCH, "stop", until=None, reason=REASON, by="grace")

    page.locator("#live").get_by_text(REASON).first.wait_for(timeout=scale_timeout(SOON))


def asked(looking, kind):
    return [one for one in looking.requests if one.resource_type == kind]
