"""Object stores for tests: a folder, and S3 by moto behind a proxy that injects faults."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import quote

import pytest

from forgekeeper.targets import sentinel
from forgekeeper.targets.objects import ObjectStore
from tests.harness.faulty_s3 import FaultyS3
from tests.harness.installation import INSTALLATION


class Folder:
    """A store in a folder, read without the library that the product uses."""

    def __init__(self, root):
        self.root = root
        root.mkdir()
        self.url = f"file://{quote(str(root))}"

    def put(self, *paths):
        for path in paths:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")

    def keys(self):
        files = (file for file in self.root.rglob("*") if not file.is_dir())
        return {str(file.relative_to(self.root)) for file in files} - {sentinel.SENTINEL_NAME}

    def remove_folders(self):
        """Remove the empty folders that deletions leave."""
        for folder in sorted((entry for entry in self.root.rglob("*") if entry.is_dir()), reverse=True):
            with suppress(OSError):
                folder.rmdir()

    def remove_sentinel(self):
        (self.root / sentinel.SENTINEL_NAME).unlink()

    def write_sentinel(self, content):
        (self.root / sentinel.SENTINEL_NAME).write_bytes(content)


class S3:
    """A bucket for one test; boto3 writes and lists it without the proxy."""

    secret = "wJalr+XUtnFEMI/K7MDENG"

    def __init__(self, client, bucket, proxy):
        self._client = client
        self.bucket = bucket
        self.proxy = proxy
        self.url = (
            f"s3://{bucket}?endpoint={proxy.url}&allow_http=true&region=us-east-1"
            f"&access_key_id=AKIA&secret_access_key={self.secret}"
        )
        client.create_bucket(Bucket=bucket)

    def put(self, *paths):
        def put(path):
            self._client.put_object(Bucket=self.bucket, Key=path, Body=b"")

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(put, paths))

    def keys(self):
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return {entry["Key"] for page in pages for entry in page.get("Contents", [])} - {sentinel.SENTINEL_NAME}

    def begin_upload(self, path):
        """Begin a multipart upload that nobody completes; return its id."""
        begun = self._client.create_multipart_upload(Bucket=self.bucket, Key=path)
        part = {"UploadId": begun["UploadId"], "PartNumber": 1, "Body": b"a part"}
        self._client.upload_part(Bucket=self.bucket, Key=path, **part)
        return begun["UploadId"]

    def uploads(self):
        found = self._client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return {(upload["Key"], upload["UploadId"]) for upload in found}

    def keep_versions(self):
        self._client.put_bucket_versioning(Bucket=self.bucket, VersioningConfiguration={"Status": "Enabled"})

    def expire(self, **rule):
        """Give the bucket a lifecycle rule."""
        rules = [{"ID": "1", "Status": "Enabled", "Filter": {"Prefix": ""}, **rule}]
        self._client.put_bucket_lifecycle_configuration(Bucket=self.bucket, LifecycleConfiguration={"Rules": rules})

    def remove_folders(self):
        """Do nothing: a bucket has no folders."""

    def remove_sentinel(self):
        self._client.delete_object(Bucket=self.bucket, Key=sentinel.SENTINEL_NAME)

    def sentinel(self):
        return self._client.get_object(Bucket=self.bucket, Key=sentinel.SENTINEL_NAME)["Body"].read()

    def write_sentinel(self, content):
        self._client.put_object(Bucket=self.bucket, Key=sentinel.SENTINEL_NAME, Body=content)


@pytest.fixture(scope="session")
def moto():
    """Run a moto server; return its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    # Connections that clients keep open would delay the shutdown for seconds.
    server._server.block_on_close = False
    server.stop()


@pytest.fixture(scope="session")
def s3_client(moto):
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=moto, config=Config(max_pool_connections=8), **keys)
    yield client
    client.close()


@pytest.fixture
def empty_s3(moto, s3_client, tmp_path):
    """Return an S3 store without a sentinel."""
    proxy = FaultyS3(moto, S3.secret)
    yield S3(s3_client, f"b-{abs(hash(tmp_path)):x}", proxy)
    proxy.stop()


@pytest.fixture
def s3(empty_s3):
    sentinel.Store("artifacts", empty_s3.url).create_sentinel(INSTALLATION)
    empty_s3.proxy.counts.clear()
    return empty_s3


@pytest.fixture
def machine_role(s3, monkeypatch, tmp_path):
    """Give the store's client credentials from the machine's role instead of the URL."""
    s3.url = s3.url.partition("&access_key_id")[0]
    keys = {"AccessKeyId": "ROLE", "SecretAccessKey": s3.secret, "Token": "t", "Expiration": "2100-01-01T00:00:00Z"}
    s3.proxy.answer_body(200, json.dumps(keys), kinds=["other"])
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{s3.proxy.url}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))


@pytest.fixture
def folder(tmp_path):
    store = Folder(tmp_path / "the root")
    sentinel.Store("artifacts", store.url).create_sentinel(INSTALLATION)
    return store


@pytest.fixture(params=["folder", "s3"])
def store(request):
    """Run the test with each kind of store."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def objects():
    """Open a store as the product does."""
    return lambda store, **options: ObjectStore("artifacts", store.url, installation=INSTALLATION, **options)
