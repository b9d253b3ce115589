"""What `check` says about a bucket: how it deletes, what it keeps, and which lifecycle rules it has."""

import pytest

from forgekeeper.cli.check_buckets import check_stores
from tests.harness.installation import INSTALLATION
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only

SINGLY = "objects are deleted one by one, 50 at a time"
RECOMMENDED = "no known lifecycle rule aborts unfinished uploads; such a rule is recommended"
ABORT = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
EXPIRE = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}


def found(store, **options):
    """What is said of the store, each with its level, but for its sentinel."""
    settings = settings_with(object_stores={"artifacts": store.url}, **options)
    first, *others = [(one.level, one.message) for one in check_stores(settings, INSTALLATION, init=False)]
    assert first == ("ok", "artifacts has its sentinel")
    return others


@whole_only
def test_a_bucket_without_a_fault_is_ok_and_nothing_in_it_changes(s3):
    s3.put("a")

    assert found(s3) == [
        ("ok", "artifacts deletes up to 1,000 objects per request"),
        ("ok", f"artifacts: {RECOMMENDED} (docs/installation.md)"),
    ]
    assert (s3.keys(), s3.uploads()) == ({"a"}, set())


def test_a_folder_is_asked_nothing_more(folder):
    assert found(folder) == []


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "MissingContentMD5")])
def test_that_a_store_has_no_bulk_deletion_is_said(s3, status, code):
    s3.proxy.answer(status, code, kinds=["bulk"])

    assert found(s3)[0] == ("ok", f"artifacts does not delete in bulk ({status} {code}): {SINGLY}")


def test_that_answers_name_no_object_is_said(s3):
    s3.proxy.name_in_bulk(0)

    assert found(s3)[0] == ("ok", f"artifacts does not delete in bulk (the answer names no object): {SINGLY}")


def test_a_key_that_may_not_delete_is_an_error(s3):
    s3.proxy.answer(403, "AccessDenied", kinds=["bulk", "single"])

    level, message = found(s3)[0]

    assert (level, "artifacts refuses deletions: " in message, "AccessDenied" in message) == ("error", True, True)


def test_a_key_is_tried_where_it_may_delete(s3):
    found(s3, object_prefixes={"artifacts": ("up/a", "b")})

    assert s3.proxy.paths["single"] == [f"/{s3.bucket}/up/a/.forgekeeper-probe"]


@pytest.mark.parametrize("refused", [False, True], ids=["by its setting", "by its objects"])
def test_a_versioned_bucket_is_named_and_gets_no_marker_of_ours(s3, refused):
    s3.keep_versions()
    if refused:
        s3.write_sentinel(s3.sentinel())
        s3.proxy.answer(403, "AccessDenied", kinds=["other"])

    level, message = found(s3)[0]

    assert (level, message.startswith("artifacts keeps versions"), "frees no space" in message) == (
        "warning",
        True,
        True,
    )
    assert s3.proxy.counts["single"] + s3.proxy.counts["bulk"] == 0


def test_lifecycle_rules_that_apply_are_recognised(s3):
    s3.keep_versions()
    s3.expire(**EXPIRE, **ABORT)

    assert found(s3) == [
        ("ok", "artifacts keeps versions, and a lifecycle rule expires noncurrent versions"),
        ("ok", "artifacts has a lifecycle rule that aborts unfinished uploads"),
    ]


@pytest.mark.parametrize("rule", [{"Status": "Disabled"}, {"Filter": {"Prefix": "elsewhere/"}}])
def test_a_lifecycle_rule_that_does_not_apply_is_none(s3, rule):
    s3.expire(**ABORT, **rule)

    assert RECOMMENDED in found(s3)[1][1]


def test_a_key_that_may_not_list_uploads_is_told_the_grant(s3):
    s3.proxy.answer(403, "AccessDenied", kinds=["uploads"])

    level, message = found(s3)[1]

    assert (level, "grant s3:ListBucketMultipartUploads and s3:AbortMultipartUpload" in message) == ("warning", True)


@pytest.mark.usefixtures("machine_role")
def test_keys_that_only_the_machine_has_are_said_to_be_so(s3):
    keys = "its keys are not in the URL or the environment"
    cure = "unfinished uploads are not aborted; set a lifecycle rule (docs/installation.md)"

    assert found(s3) == [("ok", f"artifacts: {keys}: {SINGLY}, {cure}")]
