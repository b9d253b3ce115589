"""The story of a run: what became of it, who was in the way, its children, what it deleted."""

import html
import re
import subprocess
import sys
from datetime import timedelta
from urllib.parse import quote

import pytest

from forgekeeper.audit.deletions import Audit
from forgekeeper.cli import ticks
from forgekeeper.cli.exclude import add_exclusion
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import now
from forgekeeper.platform.database.exclusions import ExclusionSubject
from tests.harness.html import read_rows
from tests.harness.performing import start_run
from tests.harness.programs import ROOT
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

NAME, REFS = "user_status_cleanup", "git_ref_cleanup"
MINUTE = timedelta(minutes=1)
SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.usefixtures("database")


def minute():
    return now().replace(second=0, microsecond=0)


def started(batch=NAME, tick=None):
    """Start a run of the tick, or of the present minute."""
    number = JobRun.claim(batch, tick or minute(), by="sched-1:7", reason=None)
    return start_run(batch, number, by="worker-2:9")


def timeline(text):
    """Return the sentences of the timeline."""
    _, _, told = text.partition('<ol class="timeline">')
    lines = re.findall(r"<li[^>]*>(.*?)</li>", told.partition("</ol>")[0], re.DOTALL)
    return [html.unescape(" ".join(re.sub(r"<time.*?</time>", "", line).split())) for line in lines]


def page(seen, number):
    return seen(f"/runs/{number}").text


def test_the_timeline_says_what_the_command_says(seen):
    run = started()
    JobRun.succeed(run, {"deleted": 150, "batches": 2})

    told = timeline(page(seen, run.id))

    assert told == [one.sentence for one in ticks.build_timeline(JobRun.get_by_id(run.id))]
    assert any("started by worker worker-2:9" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/runs/99", "the ledger has no run 99; `forgekeeper ticks BATCH` lists the runs of a batch"),
        ("/runs/-1", "is not a number: write the number of a run"),
        (f"/runs/{'9' * 30}", "is not a number: write the number of a run"),
        (f"/runs/{quote('²')}", "is not a number: write the number of a run"),
        (f"/batches/{NAME}/ticks?time=noon", "is not a time"),
    ],
)
def test_what_does_not_exist_is_missing_with_the_sentence_of_the_command(seen, path, sentence):
    answer = seen(path)

    assert answer.status == 404
    assert sentence in answer.text


def test_a_script_in_an_error_or_in_a_result_is_escaped_and_a_secret_masked(seen):
    run = started()
    JobRun.fail(run, f"no\n{SCRIPT} postgresql://forge:hunter2@db/forge", {SCRIPT: SCRIPT}, delay=MINUTE, retries=0)

    text = page(seen, run.id)

    assert SCRIPT not in text
    assert re.search(r"<pre[^>]*>no\n&lt;script&gt;", text)
    assert "hunter2" not in text


def test_what_a_run_has_deleted_is_on_its_page(seen):
    run = started()
    Audit(NAME, on=True, run=run.id).record_deleted("user_status", ids=[7, 8, 9])

    text = html.unescape(page(seen, run.id))

    assert f"Run {run.id} of {NAME}: 3 user_status" in text
    assert "3 user_status" in [row[-1] for row in read_rows(text, "Newest deletions")]


def test_of_a_run_with_very_many_rows_in_the_audit_the_page_says_where_they_are_added_up(seen):
    run = started()
    of_run = Audit(NAME, on=True, run=run.id)
    for number in range(1_001):
        of_run.record_deleted("user_status", ids=[number])

    text = html.unescape(page(seen, run.id))

    assert f"more than 1,000 rows of run {run.id}: " in text
    assert f'<a href="/audit?run={run.id}" title="forgekeeper audit --run {run.id}">audit of run {run.id}</a>' in text
    assert f'href="/audit?run={run.id}"' in text


def test_each_child_of_this_run_is_shown_with_its_state(seen):
    run = started(REFS)
    Audit(REFS, on=True, run=run.id, child="clean_project_refs:1").record_deleted("git_ref_deletion", ids=[7])
    Audit(REFS, on=True, run=run.id + 1, child="of_another:1").record_deleted("git_ref_deletion", ids=[7])
    quarantine.record_failure(
        REFS, "clean_project_refs", "of_another:2", "no HEAD", reason="child_failed", run=run.id + 1
    )
    failed = {"reason": "child_failed", "run": run.id}
    quarantine.record_failure(REFS, "clean_project_refs", "clean_project_refs:2", f"no HEAD {SCRIPT}", **failed)
    work = {"what": "clean_project_refs", "message_id": "clean_project_refs:3", "run": run.id, "seconds": 2.0}
    facts = {"queues": ["git"], "draining": False, "at_work": [work]}
    Process.record_heartbeat(None, dead_after=MINUTE, facts=facts, kind="worker", host="h", pid=1, version="1")

    text = page(seen, run.id)

    shown = {name: state.split()[-1] for name, state, *_ in read_rows(text, "Children")}
    assert shown == {
        "clean_project_refs:1": "done",
        "clean_project_refs:2": "failing",
        "clean_project_refs:3": "started",
    }
    assert SCRIPT not in text


def test_a_page_renews_itself_while_the_run_is_open_and_ceases_long_after_its_end(console):
    run, one = started(), console()
    before = one.get(f"/runs/{run.id}").text
    JobRun.succeed(run, {"deleted": 1})
    JobRun.update(finished_at=now() - 10 * MINUTE).execute()

    assert "data-live" in before
    assert wait_until(lambda: "data-live" not in one.get(f"/runs/{run.id}").text, 10)


def test_the_runs_before_and_after_are_linked(seen):
    numbers = []
    for ago in (3, 2, 1):
        run = started(tick=minute() - ago * MINUTE)
        JobRun.succeed(run, {})
        numbers.append(run.id)
    JobRun.claim_manual("prune", by="alice")

    text = page(seen, numbers[1])

    assert re.search(rf'rel="prev" href="/runs/{numbers[0]}"', text)
    assert re.search(rf'rel="next" href="/runs/{numbers[2]}"', text)


def test_a_time_of_day_leads_to_the_story_of_that_tick(seen):
    tick = minute() - 5 * MINUTE
    run = started(tick=tick)
    JobRun.succeed(run, {"deleted": 3})

    for path in (f"?time={tick:%H:%M}", f"/{tick:%Y-%m-%dT%H:%M}"):
        text = seen(f"/batches/{NAME}/ticks{path}").text
        assert timeline(text) == [told.sentence for told in ticks.list_events(JobRun.get_by_id(run.id))]


def test_a_tick_without_a_row_says_why_there_is_none(seen):
    text = seen(f"/batches/{NAME}/ticks?time=2020-01-01T00:00:30").text

    assert "The batch was not due at 2020-01-01 00:00:30." in text


def test_a_story_says_what_is_excluded_of_the_batch_now(seen):
    run = started(REFS)
    add_exclusion(ExclusionSubject.from_text("project:7"), None, until=None, reason="the court asked")

    assert "project:7 is excluded" in page(seen, run.id)


@whole_only
def test_the_command_for_the_log_finds_the_lines_of_the_run(seen, monkeypatch):
    monkeypatch.setenv("FORGEKEEPER_LOG_FORMAT", "json")
    command = [sys.executable, "-m", "forgekeeper.cli", "run", NAME]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    (run,) = JobRun.select()

    sought = re.search(r"grep -E '([^']+)'", html.unescape(page(seen, run.id)))[1]

    found = [line for line in log.splitlines() if re.search(sought, line)]
    assert [one for one in found if "run started" in one]
    assert [one for one in found if "run finished" in one]
