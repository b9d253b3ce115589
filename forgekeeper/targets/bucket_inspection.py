"""Inspect an object store: whether it deletes, and which bytes its own rules keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import obstore
from obstore.store import AzureStore, LocalStore, S3Store

from forgekeeper.targets.bulk_deletion import delete_in_bulk
from forgekeeper.targets.s3_requests import Element, S3Refused, S3Requests, parse_xml, requests_to
from forgekeeper.targets.sentinel import PLACE_TIMEOUT, PROBE_NAME, SENTINEL_NAME
from forgekeeper.targets.store_urls import STORE_ERRORS, describe_error, open_store, send_request

ABORT_UPLOADS = "AbortIncompleteMultipartUpload"
"""Action of a lifecycle rule: abort multipart uploads that are unfinished for some days."""
EXPIRE_VERSIONS = "NoncurrentVersionExpiration"
"""Action of a lifecycle rule: delete versions that are not the newest for some days."""
NO_LIFECYCLE_STATUS, FORBIDDEN_STATUS = 404, 403

BucketAnswer = TypeVar("BucketAnswer")


class BucketInspection:
    """The store behind a URL, to be inspected.

    Methods raise one of `STORE_ERRORS` if it does not answer, unless stated.  Changes nothing.  Deletions of a name
    without an object, in the first of *prefixes*, show whether the store deletes.
    """

    def __init__(self, url: str, prefixes: Sequence[str]) -> None:
        self._store = open_store(url, request_timeout=PLACE_TIMEOUT, retries=1, retry_timeout=PLACE_TIMEOUT)
        self._requests = requests_to(self._store, url, timeout=PLACE_TIMEOUT)
        self._probe = f"{prefixes[0]}/{PROBE_NAME}" if prefixes else PROBE_NAME
        self.is_folder = isinstance(self._store, LocalStore)
        self.is_s3 = isinstance(self._store, S3Store)

    @property
    def is_signed_here(self) -> bool:
        """Whether the keys are known here, so that requests can be signed."""
        return self._requests is not None

    def why_no_deletion(self) -> str | None:
        """Return why an object cannot be deleted by a request of its own; None if it can."""
        try:
            with suppress(FileNotFoundError):
                _run_awaitable(send_request(obstore.delete_async, self._store, self._probe, timeout_seconds=None))
        except STORE_ERRORS as error:
            return describe_error(error)
        return None

    def why_no_bulk_deletion(self) -> str | None:
        """Return why objects cannot be deleted in bulk; None if they can."""
        try:
            deleted = self._send_signed(lambda requests: delete_in_bulk(requests, [self._probe]))
        except STORE_ERRORS as error:
            return describe_error(error)
        return None if deleted else "the answer names no object"

    def keeps_versions(self) -> bool:
        """Return whether a deleted object stays as a version."""
        if self._requests is not None:
            with suppress(*STORE_ERRORS):
                found = self._send_signed(lambda requests: requests.send("GET", {"versioning": None}))
                if parse_xml(found.body, "VersioningConfiguration").findtext("Status") is not None:
                    return True
        # An S3 store also reports the version of each object; Google's reports one whether it keeps versions or not.
        says_so = isinstance(self._store, (S3Store, AzureStore))
        return says_so and obstore.head(self._store, SENTINEL_NAME)["version"] is not None

    def lifecycle_actions(self) -> set[str] | None:
        """Return the actions of lifecycle rules for the whole store; None if rules are hidden."""
        try:
            found = self._send_signed(lambda requests: requests.send("GET", {"lifecycle": None}))
            rules = parse_xml(found.body, "LifecycleConfiguration").findall("Rule")
        except STORE_ERRORS as error:
            return set() if isinstance(error, S3Refused) and error.status == NO_LIFECYCLE_STATUS else None
        return {action.tag for rule in rules if self._is_in_force(rule) for action in rule}

    def _is_in_force(self, rule: Element) -> bool:
        """Return whether a lifecycle rule applies to all objects and uploads of the store."""
        prefix = rule.findtext("Filter/Prefix") or rule.findtext("Prefix") or ""
        is_whole = all(rule.find(f"Filter/{condition}") is None for condition in ("And", "Tag"))
        covers = self._requests is None or self._requests.prefix.startswith(prefix)
        return rule.findtext("Status") == "Enabled" and is_whole and covers

    def why_no_uploads(self) -> str | None:
        """Return why unfinished uploads may not be listed; None if they may or are not supported."""
        try:
            self._send_signed(lambda requests: requests.send("GET", {"uploads": None, "max-uploads": "1"}))
        except S3Refused as refused:
            return describe_error(refused) if refused.status == FORBIDDEN_STATUS else None
        return None

    def _send_signed(self, send: Callable[[S3Requests], Awaitable[BucketAnswer]]) -> BucketAnswer:
        requests = self._requests
        assert requests is not None, "the caller has asked `is_signed_here`"
        return _run_awaitable(send(requests))


def _run_awaitable(work: Awaitable[BucketAnswer]) -> BucketAnswer:
    async def await_work() -> BucketAnswer:
        return await work

    return asyncio.run(await_work())
