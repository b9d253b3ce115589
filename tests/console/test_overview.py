"""The first page lists what needs attention, then shows each batch, what people did today, and where this is."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import unescape

import pytest

from forgekeeper.api.batches import BATCHES, FeatureFlag, list_queues
from forgekeeper.audit import acts
from forgekeeper.cli import holding
from forgekeeper.cli.console import backlogs
from forgekeeper.guards import breaker
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.platform.installation import INSTALLATION_KEY
from tests.harness.past_runs import add_past_runs

SCRIPT = "<script>alert(1)</script>"
BATCH = "user_status_cleanup"
DAY = timedelta(days=1)


@pytest.fixture
def known(database):
    """Let the batches be known for a year, and every flag be on."""
    Batch.register(BATCHES)
    Batch.update(registered_at=now() - 365 * DAY).execute()
    for batch in BATCHES.values():
        if batch.flag:
            FeatureFlag.turn(batch.flag, on=True)


@pytest.fixture
def healthy(known):
    """Let everything live, and every tick of now have its run."""
    at = now()
    row = {"host": "forge-1", "version": "1.0", "alive_at": at, "silent_from": at + DAY}
    Process.create(kind="worker", pid=7, queues=[*list_queues()], **row)
    Process.create(kind="scheduler", pid=8, timetable=dict.fromkeys(BATCHES, "0 0 1 1 *"), **row)
    for name in BATCHES:
        run = {"claimed_at": at, "started_at": at, "finished_at": at, "result": {"deleted": 12, "failed": 0}}
        JobRun.create(batch=name, tick=at, state="succeeded", **run)


def said(text):
    """Return what one reads in each part of the page, by its id."""
    _, *parts = re.split(r'<section id="(\w+)"', text.partition("</main>")[0])
    read = (" ".join(unescape(re.sub(r"<[^>]+>|^[^>]*>", " ", part)).split()) for part in parts[1::2])
    return dict(zip(parts[::2], read, strict=True))


def in_a_thread(look):
    """Look as the console does: on a connection that is given back."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(look).result()


def deleted(records, ago=0, run=1, batch=BATCH):
    at = now()
    RunTotal.create(batch=batch, run=run, day=(at - ago * DAY).date(), records=records)


def problems(page):
    """Return the lines of the list of problems, each as one reads it."""
    rows = re.findall(
        r"<tr\b.*?</tr>", page.text.partition('<section id="problems">')[2].partition("</section>")[0], re.DOTALL
    )
    return [" ".join(unescape(re.sub(r"<[^>]+>", " ", row)).split()) for row in rows[1:]]


def test_problems_come_first_and_what_is_always_so_last(seen, known):
    assert list(said(seen("/").text)) == ["problems", "batches", "today", "where"]


def test_an_installation_without_a_problem_says_so_in_a_line(seen, healthy):
    page = said(seen("/").text)

    assert "UTC ✓ ok Nothing needs attention" in page["problems"]
    assert page["today"] == "Today (UTC) 0 records deleted. Undo Nobody has acted today."


def test_the_amount_of_today_stands_beside_the_usual(seen, known):
    deleted(70)
    for ago in range(1, 15):
        deleted(100 * ago, ago=ago)

    assert " 70 usual 750 " in said(seen("/").text)["batches"]


@pytest.mark.parametrize(("today", "unusual"), [(3_000, True), (2_800, False)])
def test_an_amount_is_unusual_that_is_far_above_the_most_of_the_days_before(seen, healthy, today, unusual):
    deleted(today)
    deleted(1_400, ago=3)

    expected = [f"! unusual {BATCH} {today:,} records deleted today, at most 1,400 on an earlier day Undo"]
    assert problems(seen("/")) == (expected if unusual else [])


def test_a_batch_that_was_never_there_before_has_nothing_usual(seen, database):
    Batch.register([BATCH])
    deleted(3_000)

    page = seen("/")

    assert "unusual" not in " ".join(problems(page))
    assert "3,000 records deleted." in said(page.text)["today"]


@pytest.mark.parametrize(
    ("kind", "until", "line"),
    [
        ("breaker", None, rf"■ held {BATCH} too much [\d.]+ s ago the circuit breaker Preview"),
        ("pause", timedelta(hours=3), rf"‖ paused {BATCH} too much [\d.]+ s ago , ends in (3 h 0|2 h 59) min olga"),
        ("stop", None, rf"■ stopped {BATCH} too much [\d.]+ s ago , until resumed olga"),
    ],
)
def test_a_hold_is_one_line_with_who_why_and_until_when(seen, healthy, kind, until, line):
    Hold.add(BATCH, kind, reason="too much", by="olga", until=until and now() + until)

    (found,) = problems(seen("/"))

    assert re.fullmatch(line, found)


def test_a_long_reason_is_a_phrase_with_the_whole_on_demand(seen, healthy):
    reason = "the disks of the forge are being moved to the other building, see the ticket"
    Hold.add(BATCH, "stop", reason=reason, by="olga")

    text = seen("/").text

    (summary,) = re.findall(r"<summary>(the disks.*?)</summary>", text)
    assert len(summary) <= 60
    assert text.count(reason) == 1


def test_what_is_not_deleted_and_what_fails_is_a_line_each_with_why_and_since_when(seen, healthy):
    flagged = next(batch for batch in BATCHES.values() if batch.flag)
    FeatureFlag.turn(flagged.flag, on=False)
    Batch.block(BATCH, reason="clocks", sentence="PostgreSQL's clock is 90 s ahead")
    run = dict.fromkeys(("tick", "claimed_at", "started_at", "finished_at"), now())
    JobRun.create(batch=BATCH, state="failed", failures=4, error="no space", **run)
    failed = dict.fromkeys(("since", "failed_at", "retry_at"), now())
    Quarantined.create(batch=BATCH, record="x", key="1", reason="child_failed", error="git hangs", **failed)

    blocked, run_fails, child_fails, off = problems(page := seen("/"))

    assert re.match(rf"■ blocked {BATCH} PostgreSQL's clock is 90 s ahead .* ago Check", blocked)
    assert re.match(rf"✗ failing {BATCH} it has failed 4 times since its last success: no space .* ago", run_fails)
    assert re.match(rf"✗ failing {BATCH} 1 child fails: git hangs .* ago Which children", child_fails)
    assert re.match(rf"○ off {flagged.name} its flag is off .* ago", off)
    assert f'href="/quarantine?batch={BATCH}&amp;kind=child"' in page.text


def test_a_batch_shows_its_most_urgent_state(seen, healthy):
    Hold.add(BATCH, "pause", reason="moving", by="olga")
    Batch.block(BATCH, reason="clocks", sentence="PostgreSQL's clock is 90 s ahead")

    assert f"{BATCH} ■ blocked" in said(seen("/").text)["batches"]


def test_a_release_says_by_whom_and_how_much_is_left(seen, known):
    Hold.add(BATCH, "breaker", reason="too much", by="worker-1")
    breaker.release_batch(BATCH, reason="looked at it", by="olga", expect=5_000)

    assert re.search(r"released by olga .* ago ?, 5,000 left", said(seen("/").text)["batches"])


def test_ticks_that_were_missed_since_the_last_run_are_counted(seen, healthy):
    for minutes in (3, 2):
        JobRun.create(batch=BATCH, tick=now() - timedelta(minutes=minutes), state="missed", claimed_at=now())

    (line,) = problems(seen("/"))

    assert line.startswith(f"! missed {BATCH} 2 ticks in a row were skipped: no scheduler was running 3 min")


def test_without_processes_it_says_that_nothing_is_sent_and_nobody_works(seen, known):
    lines = problems(seen("/"))

    assert lines[0] == "✗ unserved all batches no scheduler is running: due runs are not sent Processes"
    (line,) = [line for line in lines if "no worker serves queue git" in line]
    assert [name for name in BATCHES if name in line] == ["git_ref_cleanup"]


def test_a_new_installation_shows_first_steps_and_no_problem(seen, known):
    holding.hold_new_batches(holding.list_deleting_batches())

    page = said(text := seen("/").text)

    assert list(page) == ["steps", "problems", "batches", "today", "where"]
    assert "○ to-do Processes : a scheduler is running" in page["steps"]
    assert "✓ done Data : every batch finds its tables" in page["steps"]
    assert f"{BATCH} Preview" in page["steps"]
    assert "unserved" not in page["problems"]
    assert f'href="/batches/{BATCH}/preview"' in text


def test_the_redis_of_another_installation_is_an_error(seen, known):
    client.set(INSTALLATION_KEY, "another")

    assert problems(page := seen("/"))[0].startswith("✗ error Redis: ")
    assert "installation another" in said(page.text)["problems"]


def test_a_root_of_another_installation_is_an_error_and_a_password_is_nowhere(console, urls, known, tmp_path):
    (tmp_path / ".forgekeeper-root").write_text("installation: another\n")

    text = console(repositories_root=tmp_path, redis_url=urls.redis.replace("://", "://:geheim@")).get("/").text

    assert "belongs to installation another" in said(text)["problems"]
    assert "redis" in said(text)["where"]
    assert "geheim" not in text


def test_schedulers_that_disagree_are_an_error(seen, healthy):
    row = {"host": "forge-2", "version": "1.0", "alive_at": now(), "silent_from": now() + DAY}
    Process.create(kind="scheduler", pid=9, timetable=dict.fromkeys(BATCHES, "0 0 2 1 *"), **row)

    assert "✗ error schedulers have different schedules" in problems(seen("/"))[0]


def test_a_silent_process_is_a_problem_even_if_others_serve_its_queues(seen, healthy):
    Process.create(kind="worker", pid=9, host="forge-2", version="1.0", queues=[], alive_at=now(), silent_from=now())

    (line,) = problems(seen("/"))

    assert line.startswith("✗ silent worker forge-2:9 sends no heartbeat")


@pytest.mark.parametrize(("kind", "shown"), [("pause", "waits"), (None, "done in about")])
def test_a_batch_that_is_held_back_has_no_time_until_its_backlog_is_gone(seen, known, kind, shown):
    add_past_runs(BATCHES[BATCH], [600.0 * n for n in range(6)], 100)
    database.execute_sql("insert into user_statuses (user_id, clear_status_at) select 1, now()")
    if kind:
        Hold.add(BATCH, kind, reason="moving", by="olga")

    assert f" 1 {shown} " in said(seen("/").text)["batches"]


def test_what_people_did_today_is_shown_with_the_reason(seen, known):
    with acts.recording_acts(on=True, actor="olga"):
        acts.record_act("pause", BATCH, batch=BATCH, reason="moving the disks")

    assert re.search(rf"\(olga\) pause {BATCH} moving the disks", said(seen("/").text)["today"])


def test_each_batch_says_what_it_did_and_each_tick_leads_to_its_story(seen, healthy):
    page = said(seen("/").text)["batches"]

    assert f"{BATCH} ✓ ok" in page
    assert " 0 0 1 1 * " in page
    assert "✓ succeeded deleted=12" in page
    assert "failed=0" not in page
    assert f'href="/runs/{JobRun.select_newest_first(BATCH).first().id}" tabindex="-1"' in seen("/").text


def test_scripts_in_reasons_are_escaped(seen, known):
    Hold.add(BATCH, "stop", reason=SCRIPT, by=SCRIPT)
    Batch.block(BATCH, reason="clocks", sentence=SCRIPT)

    text = seen("/").text

    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


def test_backlogs_are_known_minute_by_minute(database):
    looked = backlogs.BacklogHistory()
    for _ in range(2):
        in_a_thread(looked.read_backlogs)

    (first, _), (second, due) = looked.chart_points(BATCH)

    assert first < second <= now()
    assert due == 0


def test_a_database_that_is_away_costs_a_minute_and_not_the_thread(database, monkeypatch):
    looked = backlogs.BacklogHistory()
    monkeypatch.setattr(backlogs, "now", lambda: database.execute_sql("select * from nowhere"))
    in_a_thread(looked.read_backlogs)

    assert looked.chart_points(BATCH) == [(None, None)]


def test_without_a_relation_of_the_forge_every_page_answers_and_its_batch_is_blocked(seen, database):
    database.execute_sql("alter table bulk_imports rename to gone")
    try:
        pages = {path: seen(path) for path in ("/", "/batches/stale_imports", "/quarantine")}
        preview = seen("/batches/stale_imports/preview")
    finally:
        database.execute_sql("alter table gone rename to bulk_imports")

    assert {path: page.status for path, page in pages.items()} == dict.fromkeys(pages, 200)
    assert "table bulk_imports is missing" in preview.text


def test_the_page_says_how_long_a_backlog_takes_and_what_a_week_has_freed(seen, known):
    add_past_runs(BATCHES[BATCH], [600.0 * n for n in range(6)], 100)
    due = "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, 1000) n"
    database.execute_sql(due)
    RunTotal.create(batch="expired_job_artifacts", run=1, day=now().date(), records=1, bytes=1_500_000)

    page = said(seen("/").text)

    assert re.search(r"done in about 1 h 2\d min", page["batches"])
    assert "1.5 MB freed in the last 7 days." in page["today"]
