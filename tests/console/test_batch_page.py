"""A batch: what holds it, its ticks page by page, what limits it, and what a run of it would do."""

import html
import json
import re
import subprocess
import sys

import pytest

from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import Amount, RunTotal
from forgekeeper.platform.database import database as db
from tests.harness.html import read_rows
from tests.harness.many_rows import artifacts, statuses
from tests.harness.programs import ROOT
from tests.harness.thorough import whole_only

NAME = "user_status_cleanup"
PAGE = f"/batches/{NAME}"
TICKS = """
    insert into job_runs (batch, tick, state, reason, claimed_by, claimed_at, finished_at)
    select %s, tick, case when n %% 10 = 0 then 'missed' else 'succeeded' end, null, 'sched:1', tick, tick
    from generate_series(1, %s) as n,
        lateral (select date_trunc('minute', clock_timestamp()) - n * interval '1 minute' as tick) as at
"""
SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.usefixtures("database")


def ticks(count):
    db.execute_sql(TICKS, [NAME, count])


def runs(text):
    """Return the numbers in the table of ticks."""
    return [int(number) for number, *_ in read_rows(text, "Ticks, newest first")]


def every_page(seen, path):
    found = []
    while path:
        text = seen(path).text
        found.append(runs(text))
        following = re.search(r'<a rel="next" href="([^"]+)"', text)
        path = following and PAGE + html.unescape(following[1])
    return found


def test_ticks_are_paged_backwards_without_gaps(seen):
    JobRun.claim_manual("prune", by="alice")
    ticks(120)

    pages = every_page(seen, PAGE)

    assert [len(page) for page in pages] == [50, 50, 20]
    assert [number for page in pages for number in page] == list(range(121, 1, -1))


def test_a_filter_by_state_shows_only_these_on_every_page(seen):
    ticks(700)

    pages = every_page(seen, f"{PAGE}?state=missed")

    assert [number for page in pages for number in page] == list(range(700, 0, -10))


@pytest.mark.parametrize("query", ["state=sock", "before=x", "before=-1", "before=" + "9" * 30])
def test_what_is_no_state_or_no_number_is_refused_by_a_sentence(seen, query):
    assert seen(f"{PAGE}?{query}").status == 404


def test_a_batch_that_does_not_exist_is_missing_with_the_sentence_of_the_commands(seen):
    for path in ("/batches/sock", "/batches/sock/preview", "/batches/sock/ticks?time=03:06"):
        answer = seen(path)
        assert answer.status == 404
        assert "there is no batch &#39;sock&#39;; there are: " in answer.text


def test_who_has_paused_it_and_why_is_said(seen):
    Hold.add(NAME, "pause", reason=f"a migration {SCRIPT}", by="alice@host")

    text = seen(PAGE).text

    assert "has been paused by alice@host" in text
    assert "a migration &lt;script&gt;" in text
    assert SCRIPT not in text


def test_what_its_runs_have_deleted_and_where_the_next_goes_on_is_said(console):
    ticks(1)
    RunTotal.add(NAME, 1, Amount(1234, 0))
    Batch.store_position(NAME, 4711)

    text = console(max_per_day_user_status_cleanup=2000).get(PAGE).text

    assert ["records per day", "2,000", "1,234"] in read_rows(text)
    assert re.search(r"run 1, tick of [^:]+:[^:]+:[^:]+: 1,234 deleted", text)
    assert "<dt>Cursor</dt><dd>4711</dd>" in text


def test_its_alerts_lead_to_what_to_do_about_them(seen):
    text = seen(PAGE).text

    assert '<a href="/alerts#UserStatusCleanupDurationHigh">' in text
    assert '<a href="/runbooks/slow_runs#userstatuscleanupdurationhigh"' in text
    assert "GitRefCleanupDeadLetters" not in text


@whole_only
def test_a_preview_has_the_numbers_of_a_dry_run_and_changes_nothing(seen):
    statuses(1234)
    command = [sys.executable, "-m", "forgekeeper.cli", "run", NAME, "--dry-run", "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    dry = json.loads(said)

    text = seen(f"{PAGE}/preview").text

    assert dry["due"] == 1234
    assert "<strong>1,234</strong> due in all" in text
    assert [one["id"] for one in dry["parts"][0]["sample"]] == [
        number for number, _ in read_rows(text, "user_status, examples")
    ]
    assert db.execute_sql("select count(*) from user_statuses").fetchone() == (1234,)
    assert not JobRun.select().exists()


def test_a_preview_says_whose_the_records_are(seen):
    artifacts(12)

    text = seen("/batches/expired_job_artifacts/preview").text

    assert ["1", "12"] in read_rows(text)
    assert re.search(r"flag \w+ is off", text)
