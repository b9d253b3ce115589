"""`status` and `processes`: what is kept, served, at work and wrong; and what PostgreSQL alone answers within two seconds."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta

import pytest
import redis

from demo import sample_data as sample
from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.status import TolerantReader
from forgekeeper.delivery import queues
from forgekeeper.delivery.broker import broker
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.platform.installation import INSTALLATION_KEY
from tests.harness import installation
from tests.harness.past_runs import add_past_runs
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout

NAME = "user_status_cleanup"
WITHIN = 2.0
"""Seconds that `status` may take; the look itself has to leave room for a crowded machine."""
DEAD_AFTER = timedelta(minutes=5)
EVERY_DAY = dict.fromkeys(BATCHES, "30 4 * * *")
ALL_QUEUES = sorted(broker.get_declared_queues())
STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
MANY = "insert into user_statuses (user_id, clear_status_at) select id, now() from generate_series(1, 100001) as id"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def on_a_terminal(environment, monkeypatch):
    """Run a command on a terminal of eighty columns; return its exit status and what is on the screen."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*arguments):
        ours, its = pty.openpty()
        variables = environment() | {"TERM": "xterm-256color", "COLUMNS": "80"}
        line = [sys.executable, "-m", "forgekeeper.cli", *arguments]
        with subprocess.Popen(line, env=variables, stdin=its, stdout=its, stderr=its) as process:
            os.close(its)
            screen = b""
            with suppress(OSError):  # of a terminal whose other end is closed
                while read := os.read(ours, 4096):
                    screen += read
            os.close(ours)
        return process.returncode, screen.decode()

    return run


@pytest.fixture
def status(main):
    """Ask for it as an object."""
    return lambda **settings: main("status", "--json", **settings).json


def process(kind, pid=1, *, host="forge-1", dead_after=DEAD_AFTER, **facts):
    Process.record_heartbeat(None, kind=kind, host=host, pid=pid, version="1.0", dead_after=dead_after, facts=facts)


def scheduler(pid=1, timetable=EVERY_DAY, **options):
    process("scheduler", pid, timetable=timetable, **options)


def worker(pid=2, queues=ALL_QUEUES, **options):
    process("worker", pid, queues=queues, **options)


def line_of(name, shown, heading):
    """The line that begins with the name, in the table below the heading."""
    _before, _heading, below = shown.partition(heading)
    return next(line for line in below.splitlines() if line.startswith(name))


def test_schedule_and_next_are_what_the_living_scheduler_keeps_and_nothing_is_wrong(status):
    scheduler()
    worker()

    shown = status(CRON_USER_STATUS_CLEANUP="* * * * *")

    batch, at = shown["batches"][NAME], datetime.fromisoformat(shown["at"])
    following = datetime.fromisoformat(batch["next"])
    assert (batch["schedule"], following.hour, following.minute) == ("30 4 * * *", 4, 30)
    assert at < following <= at + timedelta(days=1)
    assert (shown["timetable_of"], shown["warnings"]) == ("schedulers", [])


def test_without_a_living_scheduler_it_says_so_and_shows_what_this_shell_says(status, main):
    worker()
    scheduler(dead_after=timedelta(0))

    shown, said = status(CRON_USER_STATUS_CLEANUP="15 5 * * *"), main("status").stdout

    (sentence,) = shown["warnings"]
    assert (shown["batches"][NAME]["schedule"], shown["timetable_of"]) == ("15 5 * * *", "settings")
    assert "those of this shell's settings" in said
    assert sentence == "no scheduler is running: due runs are not sent; start `forgekeeper scheduler`"
    assert f"warning: {sentence}" in said


@whole_only
@pytest.mark.parametrize("other", ["silent", "draining"])
def test_it_names_the_queues_that_no_worker_serves(status, main, other):
    scheduler()
    worker(2, ["artifacts", "cron"])
    worker(3, **({"draining": True} if other == "draining" else {"dead_after": timedelta(0)}))

    (sentence,) = status()["warnings"]

    assert sentence == "no worker serves queues git, objects: start `forgekeeper worker --queues git,objects`"
    assert f"warning: {sentence}" in main("status").stdout
    assert [status()["queues"][queue]["workers"] for queue in ("cron", "git")] == [1, 0]


def test_it_names_a_batch_of_which_two_schedulers_keep_different_times(status):
    worker(9)
    scheduler(1)
    scheduler(2, EVERY_DAY | {NAME: "* * * * *"}, host="forge-2")
    scheduler(3, EVERY_DAY | {NAME: "off"}, dead_after=timedelta(0))

    (sentence,) = status()["warnings"]

    assert sentence == (
        f"schedulers have different schedules of {NAME}: * * * * * (forge-2:2) and 30 4 * * * (forge-1:1); "
        "give them the same settings"
    )


def test_it_warns_of_a_batch_that_fails_that_is_late_and_whose_ticks_were_missed(status):
    scheduler()
    worker()
    at = now()
    JobRun.create(batch="stale_imports", tick=at, state="missed", claimed_at=at)
    run = dict.fromkeys(("tick", "claimed_at", "started_at", "finished_at"), at)
    JobRun.create(batch=NAME, state="failed", failures=1, error="no space", **run)
    database.execute_sql("insert into user_statuses (user_id, clear_status_at) values (1, now() - interval '2 h')")

    assert status()["warnings"] == [
        f"{NAME}: it has failed once since its last success: no space; see `forgekeeper why {NAME}`",
        f"{NAME}: the oldest record has waited for 2 h 0 min, its objective is 5 min 0 s; see `forgekeeper why {NAME}`",
        "stale_imports: a tick was skipped: no scheduler was running; see `forgekeeper why stale_imports`",
    ]


def test_it_warns_of_ticks_at_which_no_scheduler_has_looked(status):
    scheduler(timetable=EVERY_DAY | {NAME: "* * * * *"})
    worker()
    Batch.register([NAME])
    Batch.update(registered_at=now() - timedelta(minutes=10)).execute()

    (sentence,) = status()["warnings"]

    assert re.fullmatch(rf"{NAME}: no scheduler has claimed its ticks from \S+ \S+ to \S+ \S+; see .*", sentence)


def test_it_warns_of_a_batch_that_has_deleted_an_unusual_amount_today(status):
    scheduler()
    worker()
    Batch.register(BATCHES)
    Batch.update(registered_at=now() - timedelta(days=365)).execute()
    RunTotal.insert(batch=NAME, run=1, day=now().date(), records=3_000, bytes=0).execute()

    shown = status()

    assert (shown["amounts"][NAME]["today"], shown["amounts"][NAME]["unusual"]) == (3_000, True)
    assert shown["warnings"][-1] == (
        f"{NAME} has deleted 3,000 records today (UTC), the maximum of the 14 days before is 0:"
        f" `forgekeeper stop {NAME} --reason ...` stops it"
    )


def test_the_state_of_an_open_run_is_not_shown_beside_the_result_of_the_last_one(main):
    sample.add_statuses(5)
    main("run", NAME)
    main("send", NAME)

    shown = main("status").stdout

    assert "enqueued" in line_of(NAME, shown, "batch")
    last = line_of(NAME, shown, "last run of")
    assert "succeeded" in last
    assert "deleted=2" in last
    assert "enqueued" not in last


def test_a_backlog_is_counted_up_to_a_bound(status, main):
    database.execute_sql(MANY)

    batch = status()["batches"][NAME]

    assert (batch["backlog"], batch["backlog_is_more"]) == (100_000, True)
    assert "100,000+" in line_of(NAME, main("status").stdout, "batch")


@whole_only
def test_in_eighty_columns_names_are_whole_and_what_is_wrong_is_red(on_a_terminal, main):
    main("run", "expired_job_artifacts")
    main("send", NAME)
    Hold.add("stale_direct_uploads", "pause", until=None, reason="moving " * 20, by="ops:1")

    ended, shown = on_a_terminal("status")

    lines = STYLES.sub("", shown).splitlines()
    assert ended == 0
    assert "\x1b[31mwarning: no scheduler is running" in shown
    assert "…" not in shown
    assert {name for name in BATCHES if len([line for line in lines if line.startswith(f"{name} ")]) < 2} == set()


def test_processes_lists_who_lives_with_what_each_is_at(main):
    scheduler(5)
    worker(6, ["cron"], at_work=[{"what": NAME, "run": 12, "message_id": "12", "seconds": 60.0}])

    shown = main("processes", "--json").json

    keeps, works = shown["processes"]
    assert (keeps["kind"], keeps["host"], keeps["pid"], keeps["timetable"]) == ("scheduler", "forge-1", 5, EVERY_DAY)
    assert (works["kind"], works["queues"], works["silent"], works["draining"]) == ("worker", ["cron"], False, False)
    (work,) = works["at_work"]
    assert (work["what"], work["run"]) == (NAME, 12)
    alive, since = datetime.fromisoformat(works["alive_at"]), datetime.fromisoformat(work["since"])
    assert alive - since == timedelta(minutes=1)
    assert shown["warnings"] == main("status", "--json").json["warnings"]


def test_a_worker_that_fell_silent_works_on_nothing_and_is_counted_as_silent(main):
    work = {"what": NAME, "message_id": "7", "run": 7, "seconds": 3}
    worker(2, at_work=[work], dead_after=timedelta(0))
    worker(3, at_work=[work], draining=True)

    found, shown = main("processes", "--json").json["processes"], main("processes").stdout

    assert {one["pid"]: len(one["at_work"]) for one in found} == {2: 0, 3: 1}
    assert "silent for" in line_of("forge-1:2", shown, "process")
    assert "draining" in line_of("forge-1:3", shown, "process")
    assert "Schedulers: 0. Workers: 1. Silent: 1, see `forgekeeper processes`." in main("status").stdout


# Without Redis


@contextmanager
def frozen(server):
    """Stop the Redis's process: its kernel accepts connections, and it does not answer."""
    pid = server.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def of_another(server):
    server.set(INSTALLATION_KEY, "3f0b4f0e-0000-4000-8000-000000000000")
    yield
    server.delete(INSTALLATION_KEY)


@pytest.mark.parametrize("spoil", [frozen, of_another])
def test_status_answers_from_postgresql_alone_within_two_seconds(main, server, spoil):
    JobRun.succeed(JobRun.start_here(NAME, by="forge-1:2"), {"deleted": 7})

    with spoil(server):
        began = time.monotonic()
        result = main("status", "--json")
        lasted = time.monotonic() - began

    shown = result.json
    assert (result.status, lasted < scale_timeout(WITHIN)) == (0, True), lasted
    assert shown["batches"][NAME]["last"]["result"] == {"deleted": 7}
    assert (shown["batches"]["stale_direct_uploads"]["backlog"], shown["leases"], shown["buckets"]) == (None,) * 3
    assert (shown["queues"]["cron"]["ready"], shown["queues"]["cron"]["workers"]) == (None, 0)
    assert shown["warnings"][0] == shown["redis"]["trouble"]


def test_status_for_people_shows_a_question_mark_for_what_it_could_not_ask(main, server):
    with frozen(server):
        result = main("status")

    assert (result.status, "Leases held: ?." in result.stdout) == (0, True)
    assert "warning: cannot use Redis: " in result.stdout


def test_messages_that_nothing_can_read_are_dead_until_a_person_discards_them(main, server):
    quarantine.record_failure("unknown", "git", "a", "its body is not a message", reason="unreadable")
    server.zadd(queues.dead_letters_key("git"), {"a": 1, "b": 1})

    assert main("status", "--json").json["queues"]["git"]["dead"] == 1


def test_a_redis_that_is_full_is_asked_for_what_it_still_says_and_check_says_that_it_is_full(main, server):
    server.set(INSTALLATION_KEY, installation.INSTALLATION)

    server.config_set("maxmemory", "1")
    try:
        shown, checked = main("status", "--json").json, main("check", "--json")
    finally:
        server.config_set("maxmemory", "0")

    assert shown["queues"]["cron"]["ready"] == 0
    said = [message for _level, message in checked.findings("redis") if "Redis is full: raise maxmemory" in message]
    assert (checked.status, len(said)) == (1, 1)


@pytest.mark.parametrize(("policy", "warnings"), [("noeviction", 0), ("allkeys-lru", 1)])
def test_check_warns_of_a_redis_that_may_evict_messages(main, server, policy, warnings):
    before = server.config_get("maxmemory-policy")["maxmemory-policy"]
    server.config_set("maxmemory-policy", policy)
    try:
        checked = main("check", "--json")
    finally:
        server.config_set("maxmemory-policy", before)

    said = [message for level, message in checked.findings("redis") if level == "warning" and "evicted" in message]
    assert len(said) == warnings


def test_a_check_of_a_redis_that_takes_writes_changes_nothing_in_it(main, server):
    main("check")

    assert server.get(INSTALLATION_KEY) is None


def test_a_look_that_has_met_a_redis_that_is_away_keeps_no_other_thread_from_asking():
    asked = []

    def ask():
        asked.append(client.ping())

    with TolerantReader() as looks:
        looks.read_or_none(lost)
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        assert looks.read_or_none(client.ping) is None

    assert asked == [True]
    assert client.ping()


def lost():
    raise redis.ConnectionError("away")


def test_check_and_status_say_of_a_postgresql_that_takes_no_writes_which_setting_refuses_them(main, database, urls):
    mark = "&" if "?" in urls.database else "?"
    read_only = f"{urls.database}{mark}options=-c%20default_transaction_read_only%3Don"

    checked, shown = (main(command, "--json", DATABASE_URL=read_only) for command in ("check", "status"))

    said = "default_transaction_read_only is on, so it accepts no writes"
    assert any(one["subject"] == "postgresql" and said in one["message"] for one in checked.json["findings"])
    assert any(said in warning for warning in shown.json["warnings"])
    assert checked.status == 1


# How long it takes, and what it has freed


def test_the_time_that_a_backlog_takes_follows_from_the_rate_of_the_last_hour(main):
    add_past_runs(BATCHES[NAME], [600.0 * n for n in range(6)], 100)
    database.execute_sql(
        "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, 1000) n"
    )

    facts, shown = main("status", "--json").json["batches"], main("status").stdout

    found = facts[NAME]
    assert 690 <= found["records_per_hour"] <= 720
    assert found["seconds_left"] == pytest.approx(1_000 / (600 / 3_000), rel=0.02)
    assert re.search(rf"{NAME} .* about 1 h 2[2-5] min", shown)
    assert (facts["stale_imports"]["backlog"], facts["stale_imports"]["seconds_left"]) == (0, 0.0)


def test_of_a_batch_that_has_deleted_nothing_lately_nobody_knows_how_long_it_takes(main):
    add_past_runs(BATCHES[NAME], [7_200.0], 100)
    sample.add_statuses(5)

    assert main("status", "--json").json["batches"][NAME]["seconds_left"] is None


def test_what_was_freed_in_seven_days_is_added_up(main):
    today = now().date()
    for days, size in ((0, 1_000_000), (6, 500_000), (7, 9_000_000)):
        day = today - timedelta(days=days)
        RunTotal.create(batch="expired_job_artifacts", run=days, day=day, records=1, bytes=size)

    assert main("status", "--json").json["batches"]["expired_job_artifacts"]["bytes_freed_in_a_week"] == 1_500_000
    assert "Freed in the last 7 days: 1.5 MB." in main("status").stdout


def test_the_result_of_a_run_with_children_says_what_these_have_deleted(main):
    at = now()
    run = {"claimed_at": at, "started_at": at, "finished_at": at, "result": {"children_enqueued": 5}}
    row = JobRun.create(batch="expired_job_artifacts", state="succeeded", **run)
    RunTotal.create(batch=row.batch, run=row.id, day=at.date(), records=1_234, bytes=9)

    told, found = main("why", str(row.id)).stdout, main("why", str(row.id), "--json").json
    (listed,) = main("ticks", row.batch, "--json").json["ticks"]

    assert "children_enqueued=5 children_deleted=1234" in told
    assert "children_deleted=1234" in main("ticks", row.batch).stdout
    last = main("status", "--json").json["batches"][row.batch]["last"]
    assert {one["result"]["children_deleted"] for one in (last, listed, found["run"])} == {1_234}


def test_a_long_error_does_not_make_the_table_too_wide_to_read(main):
    at = now()
    run = {"claimed_at": at, "started_at": at, "finished_at": at, "error": "it failed, " * 50}
    JobRun.create(batch=NAME, state="failed", **run)

    last_runs = main("status").stdout.partition("last run of")[2].partition("\n\n")[0]

    assert max(map(len, last_runs.splitlines())) < 180
