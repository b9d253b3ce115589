"""Findings of `check` on object stores: owner, deletions, and bytes that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forgekeeper.cli.check_places import Finding, check_store, error, ok, warning
from forgekeeper.platform.settings import Settings
from forgekeeper.targets.bucket_inspection import ABORT_UPLOADS, EXPIRE_VERSIONS, BucketInspection
from forgekeeper.targets.bulk_deletion import MAX_KEYS_PER_REQUEST
from forgekeeper.targets.deletion import MAX_CONCURRENT_DELETIONS
from forgekeeper.targets.store_urls import STORE_ERRORS, describe_error
from metrics.logs import clean_text

OBJECT_STORE_SUBJECT = "object store"
ONE_BY_ONE_SENTENCE = f"objects are deleted one by one, {MAX_CONCURRENT_DELETIONS} at a time"
DOCS_PAGE = "docs/installation.md"


def check_stores(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    """Check each object store; check its deletions only if it belongs to this installation."""
    if not settings.object_stores:
        yield warning("object stores", "FORGEKEEPER_OBJECT_STORES is not set: no objects can be deleted")
    for location, url in settings.object_stores.items():
        found = check_store(location, url, ours, init=init)
        yield found
        if found.level == "ok":
            yield from _check_deletions(location, url.get_secret_value(), settings.object_prefixes.get(location, ()))


def _check_deletions(location: str, url: str, prefixes: Sequence[str]) -> Iterator[Finding]:
    try:
        bucket = BucketInspection(url, prefixes)
        if not bucket.is_folder:
            yield from _inspect_bucket(location, bucket)
    except STORE_ERRORS as failure:
        yield error(OBJECT_STORE_SUBJECT, clean_text(f"{location}: {describe_error(failure)}"))


def _inspect_bucket(location: str, bucket: BucketInspection) -> Iterator[Finding]:
    actions = bucket.lifecycle_actions() if bucket.is_signed_here else None
    if bucket.keeps_versions():
        yield _check_versions(location, actions)
    elif (refusal := bucket.why_no_deletion()) is not None:
        yield error(OBJECT_STORE_SUBJECT, clean_text(f"{location} refuses deletions: {refusal}"))
    elif bucket.is_signed_here:
        yield _check_bulk_deletion(location, bucket)
    if bucket.is_s3:
        yield _check_unfinished_uploads(location, bucket, actions)


def _check_bulk_deletion(location: str, bucket: BucketInspection) -> Finding:
    if (refusal := bucket.why_no_bulk_deletion()) is not None:
        return ok(
            OBJECT_STORE_SUBJECT, clean_text(f"{location} does not delete in bulk ({refusal}): {ONE_BY_ONE_SENTENCE}")
        )
    return ok(OBJECT_STORE_SUBJECT, f"{location} deletes up to {MAX_KEYS_PER_REQUEST:,} objects per request")


def _check_versions(location: str, actions: set[str] | None) -> Finding:
    if actions is not None and EXPIRE_VERSIONS in actions:
        return ok(OBJECT_STORE_SUBJECT, f"{location} keeps versions, and a lifecycle rule expires noncurrent versions")
    seen = "no lifecycle rule expires" if actions is not None else "it is not known whether a lifecycle rule expires"
    said = f"{location} keeps versions, and {seen} noncurrent versions"
    return warning(OBJECT_STORE_SUBJECT, f"{said}: without such a rule a deletion frees no space ({DOCS_PAGE})")


def _check_unfinished_uploads(location: str, bucket: BucketInspection, actions: set[str] | None) -> Finding:
    if not bucket.is_signed_here:
        keys = "its keys are not in the URL or the environment"
        return ok(
            OBJECT_STORE_SUBJECT,
            f"{location}: {keys}: {ONE_BY_ONE_SENTENCE}, unfinished uploads are not aborted;"
            f" set a lifecycle rule ({DOCS_PAGE})",
        )
    if (refusal := bucket.why_no_uploads()) is not None:
        grant = "grant s3:ListBucketMultipartUploads and s3:AbortMultipartUpload"
        return warning(
            OBJECT_STORE_SUBJECT,
            clean_text(f"{location} does not list unfinished uploads ({refusal}), so they stay: {grant}"),
        )
    if actions is not None and ABORT_UPLOADS in actions:
        return ok(OBJECT_STORE_SUBJECT, f"{location} has a lifecycle rule that aborts unfinished uploads")
    said = f"{location}: no known lifecycle rule aborts unfinished uploads; such a rule is recommended ({DOCS_PAGE})"
    return ok(OBJECT_STORE_SUBJECT, said)
