"""An installation that has lived: every batch with its history, and one of everything that a page can show.

It is written on the servers that the settings name, into tables that are there and empty.
"""

import json
import time
from datetime import UTC, datetime, timedelta

from demo.sample_data import add_samples
from forgekeeper.api.batches import BATCHES, FeatureFlag, list_queues
from forgekeeper.audit import acts
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process, read_version
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import LeaseGroup
from forgekeeper.platform.database import database, now
from forgekeeper.targets import sentinel
from tests.harness.performing import run_as_worker

TICKS = 60
PERIODS = dict.fromkeys(BATCHES, 60) | {
    "expired_job_artifacts": 300,
    "stale_direct_uploads": 360,
    "stale_imports": 4 * 3600,
    "prune": 3600,
}
"""Seconds between ticks."""
AMOUNTS = {"user_status_cleanup": 140, "expired_job_artifacts": 5_200, "delete_objects": 900, "git_ref_cleanup": 310}
WORKER, LOST = "forge-1:4711", "forge-2:980"
ERROR = "OSError: git for-each-ref: fatal: not a git repository: /srv/repositories/sample/4.git"
ODD = {
    4: {"state": "coalesced"},
    5: {"state": "coalesced"},
    6: {"state": "missed"},
    13: {"state": "skipped", "reason": "paused"},
    21: {"state": "failed", "error": ERROR, "attempt": 6, "failures": 6},
    34: {"state": "blocked", "reason": "no_store"},
}
"""What has become of some ticks, counted from the newest; the others have succeeded."""
OFTEN = {"git_ref_cleanup", "delete_objects"}
"""The batches of which some have failed, too."""
UNRUN = {"coalesced", "missed", "skipped"}
HOSTILE = "<script>alert('ran')</script><img src=x onerror=\"alert('ran')\">"
LONG = "refs/heads/" + "a-branch-whose-name-does-not-end-and-has-no-place-to-break" * 4


def settings_of(folder):
    """Return the settings, without their prefix, that lead to the store and the repositories in the folder."""
    return {
        "object_stores": json.dumps({"artifacts": (folder / "objects").as_uri()}),
        "repositories_root": str(folder / "repositories"),
        "object_grace": "0",
        "breaker_share": "1",
        "dead_after": "3600",
    }


def fill(settings, folder, installation, *, hostile=False):
    """Let it have lived; with *hostile* texts that come from outside want to be run as a script."""
    said = f" {HOSTILE} {LONG}" if hostile else ""
    for name in ("objects", "repositories"):
        (folder / name).mkdir()
        sentinel.Folder(folder / name).create_sentinel(installation)
    for batch in BATCHES.values():
        if batch.flag is not None:
            FeatureFlag.turn(batch.flag, on=True)
    Batch.register(BATCHES)
    Batch.update(registered_at=now() - timedelta(days=40)).execute()
    add_samples(1, settings)
    with acts.recording_acts(on=True, actor="ada"):
        _work(settings)
        _hold(said)
    _processes()
    _quarantine(said)
    hour = timedelta(hours=1)
    group = LeaseGroup(client, f"{WORKER} run 12", ttl=hour, max_duration=hour, clock=time.monotonic)
    group.take(["git:sample/3.git"])


def _work(settings):
    """Run every batch, after the history of each."""
    for name, period in PERIODS.items():
        JobRun.insert_many(_history(name, period)).execute()
        _totals(name)
    for batch in BATCHES.values():
        run_as_worker(batch, settings)


def _history(name, period):
    newest = int(now().timestamp()) // period * period
    shift = 5 * list(PERIODS).index(name)
    for back in reversed(range(TICKS)):
        tick = datetime.fromtimestamp(newest - back * period, UTC)
        amount = AMOUNTS.get(name, 24) * (80 + (back * 37) % 41) // 100
        facts = {"state": "succeeded", "reason": None, "error": None, "attempt": 1, "failures": 0}
        odd = ODD.get((back + shift) % TICKS, {})
        facts |= odd if name in OFTEN or odd.get("state") in UNRUN else {}
        ran = facts["state"] not in UNRUN
        lasted = timedelta(milliseconds=700 + amount % 900)
        yield facts | {
            "batch": name,
            "tick": tick,
            "claimed_by": "forge-1:4700",
            "claimed_at": tick + timedelta(milliseconds=20),
            "enqueued_at": tick + timedelta(milliseconds=30) if ran else None,
            "started_by": WORKER if ran else None,
            "started_at": tick + timedelta(milliseconds=60) if ran else None,
            "finished_at": tick + (lasted if ran else timedelta(milliseconds=30)),
            "attempt": facts["attempt"] if ran else 0,
            "result": {"deleted": amount} if facts["state"] == "succeeded" else None,
        }


def _totals(name):
    """Add up what its runs have deleted, and on the days before about as much; of artifacts less by far."""
    done = [run for run in JobRun.select_newest_first(name) if run.state == "succeeded"]
    totals = [(run.id, run.started_at.date(), run.result["deleted"]) for run in done]
    usual = sum(records for _, _, records in totals) // (4 if name == "expired_job_artifacts" else 1)
    today = now().date()
    totals += [(-ago, today - timedelta(days=ago), usual * (85 + ago * 7 % 30) // 100) for ago in range(1, 15)]
    names = ("batch", "run", "day", "records")
    RunTotal.insert_many([dict(zip(names, (name, *total), strict=True)) for total in totals]).execute()


def _hold(said):
    """Pause one, stop one, let the breaker hold one, block one; each act of a person is in the audit."""
    until, since, reason = (
        now() + timedelta(hours=2),
        now(),
        "the disks of the forge are being moved" + said,
    )
    Hold.add("stale_imports", "pause", until=until, reason=reason, by="ada", since=since)
    acts.record_act("pause", "stale_imports", batch="stale_imports", reason=reason, after={"until": until.isoformat()})
    Hold.add(
        "stale_direct_uploads",
        "stop",
        until=None,
        reason="uploads vanish, see the incident" + said,
        by="grace",
        since=since,
    )
    reason = "uploads vanish, see the incident" + said
    with acts.recording_acts(on=True, actor="grace"):
        acts.record_act("stop", "stale_direct_uploads", batch="stale_direct_uploads", reason=reason)
    sentence = (
        "a run would delete 48,210 of about 53,000 records (91%), and the largest of the last 100 runs deleted 4,310"
        + said
    )
    Hold.add("expired_job_artifacts", "breaker", until=None, reason=sentence, by=WORKER, since=since)
    Batch.block("delete_objects", reason="no_store", sentence="the store `artifacts` does not answer" + said)


def _processes():
    hour, facts = timedelta(hours=1), {"version": read_version()}
    schedules = {name: batch.cron for name, batch in BATCHES.items()}
    Process.record_heartbeat(
        None, kind="scheduler", host="forge-1", pid=4700, dead_after=hour, facts={"timetable": schedules}, **facts
    )
    run = JobRun.start_here("git_ref_cleanup", by=WORKER)
    work = [{"what": "git_ref_cleanup", "run": run.id, "message_id": str(run.id), "seconds": 42.0}]
    for pid, at_work in ((4711, work), (4712, [])):
        beat = {"queues": list(list_queues()), "at_work": at_work}
        Process.record_heartbeat(None, kind="worker", host="forge-1", pid=pid, dead_after=hour, facts=beat, **facts)
    silent = {"queues": ["git"], "at_work": []}
    Process.record_heartbeat(
        None, kind="worker", host="forge-2", pid=980, dead_after=timedelta(0), facts=silent, **facts
    )
    database.execute_sql("update processes set started_at = started_at - interval '3 days'")


def _quarantine(said):
    errors = (
        "OSError: git update-ref: cannot lock ref 'refs/merge-requests/4/head': File exists",
        "OSError: [Errno 28] No space left on device: packed-refs.new",
        "TimeoutError: git did not end within 60 s",
    )
    for key in range(1, 13):
        for _ in range(1 + key % 4):
            error = errors[key % len(errors)] + said
            quarantine.record_failure(
                "git_ref_cleanup", "clean_project_refs", str(40 + key), error, reason="child_failed"
            )
    for key in range(1, 6):
        record = f"artifacts:uploads/4f{key}c{said[:400]}"
        quarantine.record_failure(
            "stale_direct_uploads", "stale_upload", record, "NotFound: no such key", reason="record_failed"
        )
    quarantine.record_failure(
        "git_ref_cleanup", "clean_project_refs", "980", "its worker was lost", reason="worker_lost"
    )
    quarantine.record_failure("unknown", "git", "4711", "its body is not a message" + said, reason="unreadable")
    database.execute_sql("update quarantine set since = since - (100 - id) * interval '17 minutes'")
