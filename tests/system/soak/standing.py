"""How things stand: what is due, what is left, and everything once more in the end."""

from __future__ import annotations

from collections import Counter

from forgekeeper.api.batches import list_queues
from forgekeeper.delivery.queues import HEARTBEATS_KEY, bodies_key, list_fetched, ready_key
from tests.harness.artifacts import buckets
from tests.harness.stale_uploads import uploads

from .history import Final
from .watch import HALF

WRONG_STATISTICS = """
    select project_id from project_statistics
    left join (select project_id, sum(size) as size from ci_job_artifacts group by project_id) as present
        using (project_id)
    where build_artifacts_size <> coalesce(present.size, 0)
"""


def tally(rig):
    """Count, by record, what there is of a kind that grows or shrinks only by what workers do."""
    counts = {
        "user_status": "user_statuses",
        "bulk_import": "bulk_imports where status = 3",
        "entity": "bulk_import_entities where status = 3",
        "tracker": "bulk_import_trackers where status = 4",
        "expired_artifact": "ci_job_artifacts",
        "git_ref_deletion": "batched_git_ref_updates_deletions where status = 2 and ref <> 'refs/old'",
        "ref_deletion": "batched_git_ref_updates_deletions where ref = 'refs/old'",
    }
    return {record: rig.ask(f"select count(*) from {where}")[0][0] for record, where in counts.items()}


STALE = "status in (0, 1) and updated_at < now() - interval '1 day'"
OLD = "batched_git_ref_updates_deletions where status = 2 and processed_at < now() - interval '1 day'"
ALL = {
    "user_status_cleanup": ("user_id", "user_statuses where clear_status_at <= now()"),
    "stale_imports": ("id", f"bulk_imports where {STALE} union all select -id from bulk_import_entities where {STALE}"),
    "expired_job_artifacts": ("id", "ci_job_artifacts where expire_at < now() and locked = 0 and file_type <> 3"),
    "delete_objects": ("id", "deleted_objects where true"),
    "prune": ("id", OLD),
    "git_ref_cleanup": ("id", "batched_git_ref_updates_deletions where status = 1"),
}
"""Batch -> what names its work, and where it is."""
WAITING = """
    select split_part(key, ':', 2)::bigint from quarantine where record = 'clean_project_refs' and retry_at > now()
"""
DUE = {"delete_objects": "and pick_up_at <= now()", "git_ref_cleanup": f"and project_id not in ({WAITING})"}
"""Batch -> which of it is due: the rest waits for its next try."""


def left(rig):
    """Say what is still to be done, by batch; nothing when everything is."""
    found = {batch: _numbers(rig, *work) for batch, work in ALL.items()}
    found["stale_direct_uploads"] = {*_stale_uploads(rig.client), *rig.client.zrange(uploads.keys.deleting, 0, -1)}
    return {batch: len(work) for batch, work in found.items() if work}


def due(rig):
    """Say, by batch, what is due now: neither in the future nor waiting for its next try."""
    found = {batch: _numbers(rig, what, where, DUE.get(batch, "")) for batch, (what, where) in ALL.items()}
    claimed = rig.client.zrangebyscore(uploads.keys.deleting, "-inf", int(rig.client.time()[0]))
    found["stale_direct_uploads"] = {one.decode(errors="replace") for one in (*_stale_uploads(rig.client), *claimed)}
    return found


def _numbers(rig, what, where, more=""):
    return {number for (number,) in rig.ask(f"select {what} from {where} {more}")}


def _stale_uploads(client):
    return client.zrangebyscore(uploads.keys.pending, "-inf", int(client.time()[0]) - 3 * 3600)


def busy(client):
    """Say whether a message waits for a worker or is in hand: what is done in it may not have been counted yet."""
    return any(client.hlen(bodies_key(queue)) for queue in list_queues())


def named(rig):
    """Return the paths that rows, the outbox or the register name."""
    paths = [path for (path,) in rig.ask("select file_final_path from ci_job_artifacts")]
    paths += [path for (path,) in rig.ask("select store_dir || '/' || file from deleted_objects")]
    register = (member for part in _register(rig.client).values() for member in part)
    return sorted({*paths, *(member.partition(":")[2] for member in register)})


def _register(client):
    keys = {"pending": uploads.keys.pending, "deleting": uploads.keys.deleting, "failed": uploads.keys.failed}
    return {
        name: {member.decode(errors="replace"): score for member, score in client.zrange(key, 0, -1, withscores=True)}
        for name, key in keys.items()
    }


def stranded(client):
    """List what no worker would find: bodies that neither wait nor were fetched by a known worker, and ids twice."""
    known = [worker.decode() for worker in client.zrange(HEARTBEATS_KEY, 0, -1)]
    found = []
    for queue in list_queues():
        waiting, stored = client.lrange(ready_key(queue), 0, -1), client.hkeys(bodies_key(queue))
        given = {number.encode() for worker in known for _, number in list_fetched(client, worker, [queue])}
        twice = [number for number, count in Counter(waiting).items() if count > 1]
        lost = set(stored) - set(waiting) - given
        found += [f"{queue} {number.decode(errors='replace')}" for number in (*twice, *lost)]
    return found


def at_rest(rig, bares):
    """Return everything that a batch may change, for two looks to be compared."""
    tables = {
        "statuses": "user_id from user_statuses",
        "imports": "id, status, updated_at from bulk_imports",
        "entities": "id, status, updated_at from bulk_import_entities",
        "trackers": "id, status, updated_at from bulk_import_trackers",
        "artifacts": "id from ci_job_artifacts",
        "statistics": "* from project_statistics",
        "outbox": "id from deleted_objects",
        "deletions": "id, status, updated_at from batched_git_ref_updates_deletions",
    }
    found = {name: rig.ask(f"select {what} order by 1") for name, what in tables.items()}
    found["refs"] = {number: bare.refs() for number, (bare, _) in bares.items()}
    found["files"], found["register"] = sorted(rig.world.files()), _register(rig.client)
    return found


def final(rig, bares):
    """Look at everything once more, but for the ledger and the buckets."""
    deletions = "batched_git_ref_updates_deletions"
    now, clear, expire, touched, pick_up = (
        f"extract(epoch from {what})::float8"
        for what in ("clock_timestamp()", "clear_status_at", "expire_at", "updated_at", "pick_up_at")
    )

    def by_first(what):
        return {str(first): row for first, *row in rig.ask(f"select {what}")}

    return Final(
        now=rig.ask(f"select {now}")[0][0],
        statuses={user: at for user, (at,) in by_first(f"user_id, {clear} from user_statuses").items()},
        imports=by_first(f"'import:' || id, status, {touched} from bulk_imports")
        | by_first(f"'entity:' || id, status, {touched} from bulk_import_entities"),
        half_entities=rig.ask(HALF)[0][0] or [],
        artifacts=by_first(f"id, {expire}, locked, file_type, file_final_path from ci_job_artifacts"),
        wrong_statistics=[project for (project,) in rig.ask(WRONG_STATISTICS)],
        outbox=rig.ask(f"select store_dir || '/' || file, {pick_up}, attempts from deleted_objects"),
        register=_register(rig.client),
        requests=by_first(f"id, 'ref:' || project_id || ':' || ref, expected_oid, status, reason from {deletions}"),
        old_requests=rig.ask(f"select count(*) from {deletions} where processed_at < now() - interval '1 day'")[0][0],
        refs={f"ref:{number}:{ref}": oid for number, (bare, _) in bares.items() for ref, oid in bare.refs().items()},
        files=sorted(rig.world.files()),
    )


def shares(client):
    """Return the buckets; once all workers have ended, who take them for a moment even where nothing is to do."""
    state = {key.decode(): value for key, value in client.hgetall(buckets.state_key).items()}
    return {
        "available": buckets.list_available(client),
        "occupied": [held.number for held in buckets.list_occupied(client)],
        "max": int(state.get("max_buckets", 0)),
    }


def runs(rig):
    """Return the ledger, times in seconds; once all logs are written."""
    columns = ("id", "batch", "state", "reason", "attempt", "failures", "losses")
    times = ("tick", "claimed_at", "started_at", "finished_at")
    chosen = ", ".join([*columns, *(f"extract(epoch from {name})::float8" for name in times)])
    return [
        dict(zip((*columns, *times), row, strict=True)) for row in rig.ask(f"select {chosen} from job_runs order by id")
    ]
