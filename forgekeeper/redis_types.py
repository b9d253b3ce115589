"""What type each key of ours is: where another program has written one of another type, nothing works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import redis

OURS = {
    "forgekeeper:installation": "string",
    "forgekeeper:{leases}:until": "zset",
    "forgekeeper:{leases}:since": "zset",
    "forgekeeper:{leases}:owners": "hash",
    "{bulk_delete_expired_job_artifacts}:available_buckets": "set",
    "{bulk_delete_expired_job_artifacts}:occupied_buckets": "zset",
    "{bulk_delete_expired_job_artifacts}:bucket_owners": "hash",
    "{bulk_delete_expired_job_artifacts}:bucket_state": "hash",
    "{pending_direct_uploads}:pending": "zset",
    "{pending_direct_uploads}:deleting": "zset",
    "{pending_direct_uploads}:failed": "zset",
    "{pending_direct_uploads}:attempts": "hash",
    "{pending_direct_uploads}:claims": "hash",
    "{pending_direct_uploads}:adopted": "zset",
}
OF_QUEUE = {"": "list", ".msgs": "hash", ".starts": "hash", ".DQ": "list", ".DQ.msgs": "hash", ".DQ.starts": "hash"}
OF_THE_DEAD = {".XQ": "zset", ".XQ.msgs": "hash", ".XQ.reasons": "hash"}
OF_WORKER = ("__acks__.", "__started__.")


def keys(namespace: str, queues: Iterable[str]) -> list[str]:
    """List our keys, but for those of each worker."""
    ends = (*OF_QUEUE, *OF_THE_DEAD)
    return [*OURS, f"{namespace}:__heartbeats__", *(f"{namespace}:{queue}{end}" for queue in queues for end in ends)]


def misfits(client: redis.Redis, names: Sequence[str | bytes]) -> Iterator[str]:
    """Name those of the keys that are of another type than they have to be, a sentence each."""
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
        found = [answer.decode(errors="replace") for answer in pipe.execute()]
    for name, kind in zip(map(_text, names), found, strict=True):
        if kind not in {"none", _kind(name)}:
            yield (
                f"the key {name} is a {kind}, and has to be a {_kind(name)}: another program has written it; "
                "RENAME it, or DEL it where nobody needs it"
            )


def _kind(name: str) -> str:
    if name in OURS:
        return OURS[name]
    rest = name.partition(":")[2]
    if rest.startswith(OF_WORKER):
        return "set"
    if rest == "__heartbeats__":
        return "zset"
    ends = OF_QUEUE | OF_THE_DEAD
    return ends[max((end for end in ends if rest.endswith(end)), key=len)]


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="backslashreplace")
