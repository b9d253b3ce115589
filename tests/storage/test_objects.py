"""Deletion on S3: in few requests, whatever fails, and nothing believed without the sentinel."""

import time

import pytest

from forgekeeper.storage import sentinel
from forgekeeper.storage.objects import DELETED, OUTSIDE, Outcome, StoreUnavailable


def numbered(count):
    return [f"@final/{number:05}" for number in range(count)]


def unavailable(objects, paths, **options):
    with pytest.raises(StoreUnavailable) as caught:
        objects.delete(paths, **options)
    return caught.value


def test_thousands_of_objects_take_one_request_per_thousand(s3, objects):
    paths = numbered(2_500)
    s3.put(*paths[::50], "bystander")  # what was never there is deleted as well

    outcomes = objects(s3).delete(paths)

    assert s3.keys() == {"bystander"}
    assert outcomes == dict.fromkeys(paths, DELETED)
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (3, 0)


def test_a_failed_bulk_deletion_is_repeated_object_by_object(s3, objects):
    s3.put("a", "b")
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])

    outcomes = objects(s3).delete(["a", "b"])

    assert s3.keys() == set()
    assert outcomes == {"a": DELETED, "b": DELETED}


@pytest.mark.parametrize("kinds", [["head"], ["bulk"], ["bulk", "single"]])
def test_a_store_that_is_busy_for_a_moment_is_asked_again(s3, objects, kinds):
    s3.put("a", "b")
    s3.proxy.answer(503, "SlowDown", kinds=kinds, times=2)

    outcomes = objects(s3).delete(["a", "b"])

    assert s3.keys() == set()
    assert outcomes == {"a": DELETED, "b": DELETED}


@pytest.mark.parametrize(
    "content",
    [sentinel.text("d15c0"), sentinel.TEXT, b"", b"installation:\n"],
    ids=["another's", "old", "empty", "no id"],
)
def test_a_store_that_is_not_this_installation_s_is_left_alone(store, objects, content):
    store.put("a", "b")
    store.write_sentinel(content)

    with pytest.raises(StoreUnavailable, match="installation") as caught:
        objects(store).delete(["a", "b"])

    assert (caught.value.known, store.keys()) == ({}, {"a", "b"})


@pytest.mark.parametrize("content", [None, sentinel.text("d15c0")], ids=["no sentinel", "another's"])
def test_a_bucket_in_whose_place_another_comes_meanwhile_loses_no_more(s3, objects, content):
    paths = numbered(2_500)
    s3.put(*paths[::50])
    s3.proxy.before("bulk", 2, lambda: s3.remove_sentinel() if content is None else s3.write_sentinel(content))

    error = unavailable(objects(s3), paths)

    # What the second request said is not believed, and there was no third.
    assert error.known == dict.fromkeys(paths[:1_000], DELETED)
    assert s3.keys() == set(paths[2_000::50])


def test_what_was_known_when_the_time_is_up_is_told(s3, objects):
    paths = numbered(2_500)
    s3.proxy.before("bulk", 2, lambda: s3.proxy.hang("bulk"))

    outcomes = objects(s3).delete(paths, until=time.monotonic() + 7)

    assert outcomes == dict.fromkeys(paths[:1_000], DELETED)


def test_what_an_error_says_is_one_short_line_without_secrets(s3, objects):
    path = "long/" * 150 + "path"
    s3.proxy.answer(403, "AccessDenied")

    said = str(unavailable(objects(s3), [path]))
    s3.proxy.answer(200, "", times=0)
    s3.proxy.refuse_key(path, "AccessDenied")
    reason = objects(s3).delete([path])[path].reason

    assert len(reason) <= 200
    assert "\n" not in said + reason
    assert s3.secret not in said + reason
    assert "AccessDenied" in reason


# Where objects may be deleted

OUTSIDE_OF_UP = ["down/a", "up2/a", "a/up/b", "up", "upper"]


@pytest.mark.parametrize("path", OUTSIDE_OF_UP)
def test_outside_its_folders_no_object_is_deleted(s3, objects, path):
    s3.put(path, "up/a")

    outcomes = objects(s3, prefixes=["up", "other"]).delete([path, "up/a"])

    assert outcomes == {path: Outcome("failed", OUTSIDE), "up/a": DELETED}
    assert s3.keys() == {path}
