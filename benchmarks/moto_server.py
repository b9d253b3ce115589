"""An S3 endpoint in its own process: moto's server, filled without a request per object."""

from __future__ import annotations

import atexit
import subprocess
import sys
from functools import cache
from hashlib import md5
from typing import Any

BUCKET = "bench"
REGION = "us-east-1"
KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
ACCOUNT = "123456789012"
"""The only account of moto."""


def path(number: int) -> str:
    """Return the path of an object by number; like uploads, paths are in no order."""
    name = md5(str(number).encode(), usedforsecurity=False).hexdigest()
    return f"stale/{name[:2]}/{name}/@final/{name[16:]}"


def fresh(number: int) -> str:
    """Return the path of an object that is kept."""
    return f"fresh/{path(number)}"


class Endpoint:
    """A server with one bucket."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.moto_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._said()
        atexit.register(self._stop)

    @property
    def store(self) -> str:
        """URL of the bucket in the form of FORGEKEEPER_OBJECT_STORES."""
        keys = "&".join(f"{name.removeprefix('aws_')}={value}" for name, value in KEYS.items())
        return f"s3://{BUCKET}?endpoint={self.url}&allow_http=true&region={REGION}&{keys}"

    def fill(self, stale: int, stay: int) -> None:
        """Replace the content of the bucket by *stale* objects to delete and *stay* objects to keep."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{stale} {stay}\n")
        self._process.stdin.flush()
        self._said()

    def client(self) -> Any:
        """Return a boto3 client with one connection, after its first request."""
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=1, retries={"total_max_attempts": 1})
        client = boto3.client("s3", endpoint_url=self.url, region_name=REGION, config=config, **KEYS)
        client.head_bucket(Bucket=BUCKET)
        return client

    def objects(self) -> tuple[int, int]:
        """Count the objects to delete, and the objects to keep."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        keys = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return sum(key.startswith("stale/") for key in keys), sum(key.startswith("fresh/") for key in keys)

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the S3 endpoint has ended"
        return line

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()


@cache
def endpoint() -> Endpoint:
    """Return this process's endpoint, started on demand.

    Clients of stores live as long as a process.
    """
    return Endpoint()


def _serve() -> None:
    import logging

    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    backend = s3_backends[ACCOUNT]["aws"]
    for line in sys.stdin:
        stale, stay = map(int, line.split())
        backend.reset()
        backend.create_bucket(BUCKET, REGION)
        for name in [*map(path, range(stale)), *map(fresh, range(stay))]:
            backend.put_object(BUCKET, name, b"")
        print("filled", flush=True)


if __name__ == "__main__":
    _serve()
