"""The first page says what an operator asks at night, in that order."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import unescape

import pytest

from forgekeeper.batches import BATCHES, FeatureFlag, queues
from forgekeeper.connections import client
from forgekeeper.console import backlogs
from forgekeeper.database import database, now
from forgekeeper.runs import breaker
from forgekeeper.runs.holds import Batch, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.totals import RunTotal
from forgekeeper.storage.installation import INSTALLATION
from forgekeeper.storage.outbox import DeletedObject
from tests.harness.lived import lived
from tests.harness.thorough import whole_only

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
    Process.create(kind="worker", pid=7, queues=[*queues()], **row)
    Process.create(kind="scheduler", pid=8, timetable=dict.fromkeys(BATCHES, "0 0 1 1 *"), **row)
    for name in BATCHES:
        run = {"claimed_at": at, "started_at": at, "finished_at": at, "result": {"deleted": 12, "failed": 0}}
        JobRun.create(batch=name, tick=at, state="succeeded", **run)


def said(text):
    """Return what one reads in each part of the page, by its id."""
    _, *parts = re.split(r'<(?:li|section) id="(\w+)"', text.partition("</main>")[0])
    read = (" ".join(unescape(re.sub(r"<[^>]+>|^[^>]*>", " ", part)).split()) for part in parts[1::2])
    return dict(zip(parts[::2], read, strict=True))


def in_a_thread(look):
    """Look as the console does: on a connection that is given back."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(look).result()


def deleted(records, ago=0, run=1, batch=BATCH):
    at = now()
    RunTotal.create(batch=batch, run=run, day=(at - ago * DAY).date(), records=records)


def test_what_one_asks_at_night_stands_in_its_order(seen):
    assert list(said(seen("/").text)) == ["deleted", "stopped", "not_deleted", "failing", "stop", "where", "batches"]


def test_where_nothing_is_wrong_each_question_is_answered_in_a_line(seen, healthy):
    page = said(seen("/").text)

    assert "Nothing unusual is deleted: 0 records today." in page["deleted"]
    assert page["stopped"].endswith("Nothing is stopped.")
    assert page["not_deleted"].endswith("All that is due is deleted in time.")
    assert page["failing"].endswith("No child fails.")
    assert "No object in the outbox can be kept any more." in page["stop"]


def test_the_amount_of_today_stands_beside_the_usual_and_the_most(console, known):
    deleted(70)
    for ago in range(1, 15):
        deleted(100 * ago, ago=ago)

    assert f"{BATCH} 70 750 1,400 lets runs begin" in said(console(breaker_share="0.3").get("/").text)["deleted"]


@pytest.mark.parametrize(
    ("today", "answer"), [(3_000, f"{BATCH} 3,000 ! unusual"), (2_800, "Nothing unusual is deleted: 2,800 records")]
)
def test_an_amount_is_unusual_that_is_far_above_the_most_of_the_days_before(seen, known, today, answer):
    deleted(today)
    deleted(1_400, ago=3)

    assert answer in said(seen("/").text)["deleted"]


def test_a_batch_that_was_never_there_before_has_nothing_usual(seen, database):
    Batch.register([BATCH])
    deleted(3_000)

    assert "Nothing unusual is deleted: 3,000 records today." in said(seen("/").text)["deleted"]


@whole_only
@pytest.mark.parametrize(
    ("kind", "until", "answer"),
    [
        ("breaker", None, r"held \(breaker\) olga too much .* ago it is released"),
        ("pause", timedelta(hours=3), r"paused olga too much [\d.]+ s ago in (3 h 0|2 h 59) min"),
        ("stop", None, "stopped olga too much .* ago it is resumed"),
    ],
)
def test_a_hold_says_who_why_and_until_when(seen, known, kind, until, answer):
    Hold.add(BATCH, kind, reason="too much", by="olga", until=until and now() + until)

    assert re.search(answer, " ".join(said(seen("/").text).values()))


def test_the_reason_of_a_hold_stands_once_on_the_page(seen, known):
    Hold.add(BATCH, "breaker", reason="too much", by="olga")

    assert " ".join(said(seen("/").text).values()).count("too much") == 1


def test_what_is_not_deleted_and_what_fails_says_why_and_since_when(seen, healthy):
    flagged = next(batch for batch in BATCHES.values() if batch.flag)
    FeatureFlag.turn(flagged.flag, on=False)
    Batch.block(BATCH, reason="clocks", sentence="PostgreSQL's clock is 90 s ahead")
    run = dict.fromkeys(("tick", "claimed_at", "started_at", "finished_at"), now())
    JobRun.create(batch=BATCH, state="failed", failures=4, error="no space", **run)
    failed = dict.fromkeys(("since", "failed_at", "retry_at"), now())
    Quarantined.create(batch=BATCH, record="x", key="1", reason="child_failed", error="e", **failed)

    page = said(text := seen("/").text)

    assert re.search(rf"{flagged.name} ○ off [\d.]+ s ago its flag is off", page["not_deleted"])
    assert re.search(rf"{BATCH} ■ blocked .* ago PostgreSQL's clock is 90 s ahead", page["not_deleted"])
    assert re.search(rf"{BATCH} ✗ failing .* ago it has failed 4 times .* ended well: no space", page["not_deleted"])
    assert f"{BATCH} ■ blocked" in page["batches"]
    assert f'href="/quarantine?batch={BATCH}&amp;kind=child">{BATCH}: 1 child fails' in text


def test_a_release_says_by_whom_and_how_much_is_left(seen, known):
    Hold.add(BATCH, "breaker", reason="too much", by="worker-1")
    breaker.release(BATCH, reason="looked at it", by="olga", expect=5_000)

    page = said(seen("/").text)["deleted"]

    assert re.search(r"released by olga .* ago \( ?looked at it\), until 5,000 more records are deleted", page)


def test_ticks_that_were_missed_since_the_last_run_are_counted(seen, healthy):
    for minutes in (3, 2):
        JobRun.create(batch=BATCH, tick=now() - timedelta(minutes=minutes), state="missed", claimed_at=now())

    assert f"{BATCH} ! missed 3 min" in (page := said(seen("/").text)["not_deleted"])
    assert "2 ticks in a row were missed" in page


def test_without_processes_it_says_that_nothing_is_sent_and_nobody_works(seen, known):
    page = said(seen("/").text)["not_deleted"]

    assert "all batches ✗ unserved not known no scheduler lives" in page
    assert "no worker takes from queue cron" in page


def test_it_says_how_many_objects_can_be_kept_and_until_when(seen, known):
    for hours in (1, 5):
        DeletedObject.create(store_dir="a", file=str(hours), pick_up_at=now() + timedelta(hours=hours))

    assert re.search(
        r"2 objects lie in the outbox and can be kept: the first goes in (59 min|1 h).* , the last in (4 h 59|5 h 0) min",
        said(seen("/").text)["stop"],
    )


def test_what_was_deleted_last_and_can_be_undone_has_its_command(seen, known):
    database.execute_sql(
        "insert into audit_deletions (batch, record, run, phase, ids, hashes, detail)"
        " values ('git_ref_cleanup', 'git_ref_deletion', 7, 'outcome', '{41}', '{}', '{\"state\": \"deleted\"}')"
    )

    page = said(seen("/").text)["stop"]

    assert re.search(r"until `git gc` prunes .* ago by run 7 : forgekeeper refs restore 41", page)


@whole_only
@pytest.mark.parametrize(
    ("hours", "seen_there"),
    [
        (1.5, r"by run 7 and can come back for 22 h \d+ min: forgekeeper objects hold --run 7 \."),
        (25, r"by run 7 and cannot come back any more\."),
    ],
)
def test_what_can_be_undone_has_its_command_for_no_longer_than_it_can(seen, known, hours, seen_there):
    database.execute_sql(
        "insert into audit_deletions (at, batch, record, run, phase, ids, hashes, detail) values (now() - %s *"
        " interval '1 h', 'expired_job_artifacts', 'expired_artifact', 7, 'done', '{41}', '{}', '{\"project_id\": 5}')",
        (hours,),
    )

    assert re.search(seen_there, said(seen("/", object_grace="86400").text)["stop"])


def test_what_is_due_can_be_kept_until_a_run_deletes_it(seen, known):
    database.execute_sql(
        "insert into audit_deletions (at, batch, record, run, phase, ids, hashes, detail) values (now() - interval"
        " '25 h', 'expired_job_artifacts', 'expired_artifact', 7, 'done', '{41}', '{}', '{\"project_id\": 5}')"
    )
    DeletedObject.create(store_dir="a", file="b", pick_up_at=now() - timedelta(hours=1))

    page = said(seen("/", object_grace="86400").text)["stop"]

    assert "by run 7 : forgekeeper objects hold --run 7" in page
    assert re.search(
        "1 object lies in the outbox and can be kept: the first has been due since .* delete_objects", page
    )


def test_batches_are_named_whose_deletions_cannot_be_undone(seen, known):
    page = said(seen("/").text)["stop"]

    assert "What user_status_cleanup, delete_objects, stale_direct_uploads have deleted does not come back." in page


def test_the_redis_of_another_installation_is_an_error(seen, known):
    client.set(INSTALLATION, "another")

    assert re.search(r"Redis ✗ error \S+ : .* installation another", said(seen("/").text)["where"])


def test_a_root_of_another_installation_is_an_error_and_a_password_is_nowhere(console, urls, known, tmp_path):
    (tmp_path / ".forgekeeper-root").write_text("installation: another\n")

    text = console(repositories_root=tmp_path, redis_url=urls.redis.replace("://", "://:geheim@")).get("/").text

    assert "belongs to installation another" in said(text)["where"]
    assert "redis" in said(text)["where"]
    assert "geheim" not in text


def test_each_batch_says_what_it_did_and_each_tick_leads_to_its_story(seen, healthy):
    assert f"{BATCH} ✓ ok 0 0 1 1 *" in (page := said(seen("/").text)["batches"])
    assert "✓ succeeded deleted=12" in page
    assert "failed=0" not in page
    assert f'href="/runs/{JobRun.of(BATCH).first().id}" tabindex="-1"' in seen("/").text


def test_scripts_in_reasons_are_escaped(seen, known):
    Hold.add(BATCH, "stop", reason=SCRIPT, by=SCRIPT)
    Batch.block(BATCH, reason="clocks", sentence=SCRIPT)

    text = seen("/").text

    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


def test_backlogs_are_known_minute_by_minute(database):
    looked = backlogs.Backlogs()
    for _ in range(2):
        in_a_thread(looked.look)

    counts, since = looked.of(BATCH)

    assert counts == [0, 0]
    assert since <= now()


def test_a_database_that_is_away_costs_a_minute_and_not_the_thread(database, monkeypatch):
    looked = backlogs.Backlogs()
    monkeypatch.setattr(backlogs, "now", lambda: database.execute_sql("select * from nowhere"))
    in_a_thread(looked.look)

    assert looked.of(BATCH) == ([None], None)


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
    lived(BATCHES[BATCH], [600.0 * n for n in range(6)], 100)
    due = "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, 1000) n"
    database.execute_sql(due)
    RunTotal.create(batch="expired_job_artifacts", run=1, day=now().date(), records=1, bytes=1_500_000)

    page = said(seen("/").text)

    assert re.search(r"gone in: about 1 h 2\d min", page["batches"])
    assert "Freed in the last 7 days: 1.5 MB." in page["deleted"]
