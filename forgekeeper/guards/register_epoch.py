"""The epoch of a register: an emptied or different Redis lacks the batch's entries.

An epoch, a random text, is stored in Redis beside the register and in the row of the batch in PostgreSQL.  The first
run writes both.  If they differ later, the entries are lost or elsewhere, and the batch is blocked until a person says
that Redis was replaced.  A Redis that was reset to an earlier state has the same epoch: see docs/uploads.md.
"""

from __future__ import annotations

import secrets
from datetime import UTC
from typing import Any, Final

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.redis_values import decode_text
from forgekeeper.platform.database import database

REDIS_REPLACED_REASON: Final = "redis_replaced"
"""The reason of the block, in the ledger and in metrics."""
ACCEPT_REDIS_ACT = "check --init --redis-replaced"
LOST_REGISTER = (
    "Redis lacks the register of {batch}, last used {last}: Redis was emptied, or FORGEKEEPER_REDIS_URL names another"
    " Redis. Correct the setting; if the entries are lost, `forgekeeper check --init --redis-replaced --reason REASON`"
    " unblocks the batch, and `forgekeeper uploads reconcile` finds objects that no entry and no row names"
)


def why_register_is_lost(batch: BatchSpec, *, begin: bool = False) -> str | None:
    """Return a sentence if the entries of the batch are not in this Redis, else None.

    If PostgreSQL lacks an epoch, *begin* stores one in both.  Several processes that do so at once agree on one
    epoch; after a crash the next run finishes.  Raises `redis.RedisError` if Redis does not answer.
    """
    if batch.epoch_key is None:
        return None
    known = Batch.select(Batch.redis_epoch).where(Batch.name == batch.name).scalar()
    if known is None:
        if begin:
            _store_epoch(batch, _ensure_epoch(batch.epoch_key))
        return None
    if _read_epoch(batch.epoch_key) == known:
        return None
    return LOST_REGISTER.format(batch=batch.name, last=_last_used(batch.name))


def accept_redis(reason: str) -> list[str]:
    """Restart each lost register in this Redis, and audit it; return the batches."""
    replaced = [batch for batch in BATCHES.values() if why_register_is_lost(batch) is not None]
    for batch in replaced:
        assert batch.epoch_key is not None
        epoch = _ensure_epoch(batch.epoch_key)
        with database.atomic():
            acts.record_act(ACCEPT_REDIS_ACT, batch.name, batch=batch.name, reason=reason, after={"epoch": epoch})
            Batch.update(redis_epoch=None).where(Batch.name == batch.name).execute()
            _store_epoch(batch, epoch)
            Batch.end_block(batch.name, REDIS_REPLACED_REASON)
    return [batch.name for batch in replaced]


def forget_epochs() -> None:
    """Forget which Redis has the registers: a copied database has a different Redis."""
    Batch.update(redis_epoch=None).execute()


def find_warnings() -> list[str]:
    """Return a sentence for each batch whose last run lacked its register; asks no Redis."""
    return [
        f"{row.name} is blocked: {row.blocked_sentence}"
        for row in Batch.list_blocked()
        if row.blocked_reason == REDIS_REPLACED_REASON
    ]


def _ensure_epoch(key: str) -> str:
    while (found := _read_epoch(key)) is None:
        client.set(key, secrets.token_hex(16), nx=True)
    return found


def _read_epoch(key: str) -> str | None:
    found: Any = client.get(key)
    return None if found is None else decode_text(found)


def _store_epoch(batch: BatchSpec, epoch: str) -> None:
    Batch.register([batch.name])
    Batch.update(redis_epoch=epoch).where(Batch.name == batch.name, Batch.redis_epoch.is_null()).execute()


def _last_used(batch: str) -> str:
    last = JobRun.select(JobRun.finished_at).where(JobRun.batch == batch, JobRun.state == "succeeded")
    instant = last.order_by(JobRun.id.desc()).limit(1).scalar()
    return (
        "by a run that the ledger has deleted"
        if instant is None
        else f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
