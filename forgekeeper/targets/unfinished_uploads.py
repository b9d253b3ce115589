"""Find and abort multipart uploads that were never completed.

Their parts cost, and no object shows them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar

from forgekeeper.targets.s3_requests import S3Refused, S3Requests, parse_xml
from forgekeeper.targets.sentinel import PROBE_NAME

MAX_LISTING_PAGES = 10
"""Maximum pages of a listing, of up to 1,000 uploads each."""
MAX_CONCURRENT_REQUESTS = 50
"""Maximum concurrent requests about single keys."""
NO_SUCH_UPLOAD_STATUS = 404

Value = TypeVar("Value")


class UnfinishedUpload(NamedTuple):
    """A multipart upload, and when it was begun by the store's clock."""

    key: str
    id: str
    begun_at: datetime


class UnfinishedUploads:
    """The unfinished uploads of one bucket.

    All methods raise OSError or ValueError if the store refuses, or gives no answer that can be read.
    """

    def __init__(self, requests: S3Requests) -> None:
        self._requests = requests
        self._lists_by_prefix: bool | None = None

    async def abort(self, begun_before: Mapping[str, datetime]) -> int:
        """Abort the uploads to exactly these paths that began before their instants.

        Returns the number.
        """
        prefix = self._requests.prefix
        found = await self._find_uploads([f"{prefix}{path}" for path in begun_before])
        old = [upload for upload in found if upload.begun_at < begun_before[upload.key.removeprefix(prefix)]]
        for some in _in_groups(old):
            await asyncio.gather(*(self._abort_upload(upload.key, upload.id) for upload in some))
        return len(old)

    async def _find_uploads(self, keys: Sequence[str]) -> list[UnfinishedUpload]:
        """Find the uploads to these keys, by one listing of all if possible, else key by key."""
        wanted = set(keys)
        if await self._can_list_by_prefix():
            found, is_complete = await self._list_uploads(self._requests.prefix)
            if is_complete:
                return [upload for upload in found if upload.key in wanted]
        pages = [page for some in _in_groups(keys) for page in await asyncio.gather(*map(self._list_uploads, some))]
        return [upload for found, _ in pages for upload in found if upload.key in wanted]

    async def _can_list_by_prefix(self) -> bool:
        """Test with an upload of our own whether a listing shows keys that begin with a prefix.

        MinIO shows only uploads to exactly that key.  A role that may not begin uploads cannot find out.
        """
        if self._lists_by_prefix is None:
            key = f"{self._requests.prefix}{PROBE_NAME}"
            try:
                answer = await self._requests.send("POST", {"uploads": None}, key=key)
            except S3Refused:
                self._lists_by_prefix = False
                return False
            begun = parse_xml(answer.body, "InitiateMultipartUploadResult").findtext("UploadId", "")
            try:
                found, _ = await self._list_uploads(key[:-1])
                self._lists_by_prefix = begun in [upload.id for upload in found]
            finally:
                await self._abort_upload(key, begun)
        return self._lists_by_prefix

    async def _list_uploads(self, prefix: str) -> tuple[list[UnfinishedUpload], bool]:
        """List uploads to keys that begin with *prefix*; also return whether the list is complete."""
        uploads, query = list[UnfinishedUpload](), {"uploads": None, "prefix": prefix}
        for _page in range(MAX_LISTING_PAGES):
            answer = parse_xml((await self._requests.send("GET", query)).body, "ListMultipartUploadsResult")
            for found in answer.iterfind("Upload"):
                key, number = found.findtext("Key", ""), found.findtext("UploadId", "")
                uploads.append(UnfinishedUpload(key, number, datetime.fromisoformat(found.findtext("Initiated", ""))))
            if answer.findtext("IsTruncated") != "true":
                return uploads, True
            markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            query |= {name: answer.findtext(element, "") for name, element in markers.items()}
        return uploads, False

    async def _abort_upload(self, key: str, number: str) -> None:
        try:
            await self._requests.send("DELETE", {"uploadId": number}, key=key)
        except S3Refused as refused:
            if refused.status != NO_SUCH_UPLOAD_STATUS:
                raise


def _in_groups(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    return (values[start : start + MAX_CONCURRENT_REQUESTS] for start in range(0, len(values), MAX_CONCURRENT_REQUESTS))
