"""Multipart uploads that nobody completes: aborted with the objects of their paths, and no other."""

from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from forgekeeper.targets import sentinel, unfinished_uploads
from forgekeeper.targets.outcomes import OBJECT_DELETED, StoreUnavailable
from tests.harness.installation import INSTALLATION
from tests.harness.thorough import whole_only

NOW = datetime.now(UTC)
BEFORE_MOTO = datetime(2009, 1, 1, tzinfo=UTC)
"""Before everything that moto has: it says of each upload that it was begun in 2010."""
PATHS = ["a/1", "a/2"]


@pytest.fixture(params=[False, True], ids=["by prefix", "by key"])
def store(s3, request):
    """A bucket that lists uploads by a prefix of their keys, or by their whole keys alone."""
    s3.proxy.lists_exactly = request.param
    return s3


def delete(opened, *paths, before=NOW):
    assert opened.delete(paths, uploads_begun_before=dict.fromkeys(paths, before)) == dict.fromkeys(
        paths, OBJECT_DELETED
    )


@whole_only
def test_the_uploads_to_a_path_are_aborted_and_no_others(store, objects):
    for path in ("a/1", "a/1", "a/2"):
        store.begin_upload(path)
    others = {(path, store.begin_upload(path)) for path in ("a", "a/10", "a/1/b", "b/a/1")}

    delete(objects(store), *PATHS)

    assert store.uploads() == others


def test_an_upload_that_was_begun_later_is_left_alone(store, objects):
    number = store.begin_upload("a/1")

    delete(objects(store), "a/1", before=BEFORE_MOTO)

    assert store.uploads() == {("a/1", number)}


def test_uploads_are_left_alone_unless_the_caller_says_since_when(s3, objects):
    s3.begin_upload("a/1")

    objects(s3).delete(["a/1"])

    assert (len(s3.uploads()), s3.proxy.counts["uploads"]) == (1, 0)


def test_uploads_are_found_on_every_page(s3, objects):
    others = {(path, s3.begin_upload(path)) for path in ("a", "b", "z")}
    s3.begin_upload("c")
    s3.proxy.uploads_per_page = 1

    delete(objects(s3), "c")

    assert s3.uploads() == others


def test_of_more_uploads_than_are_listed_those_of_each_path_are_asked_for(s3, objects, monkeypatch):
    others = {(path, s3.begin_upload(path)) for path in ("a", "b", "z")}
    s3.begin_upload("c")
    s3.proxy.uploads_per_page = 1
    monkeypatch.setattr(unfinished_uploads, "MAX_LISTING_PAGES", 2)

    delete(objects(s3), "c")

    assert s3.uploads() == others


def test_a_thousand_paths_take_one_listing_if_the_store_lists_by_prefix(s3, objects):
    paths, opened = [f"a/{number}" for number in range(1_000)], objects(s3)
    delete(opened, "b")
    asked = s3.proxy.counts["uploads"]

    delete(opened, *paths)

    assert s3.proxy.counts["uploads"] - asked == 1


def test_the_folder_in_a_url_is_the_beginning_of_the_key(store, objects):
    store.begin_upload("in side/a/1")
    outside = store.begin_upload("a/1")
    store.url = store.url.replace("?", "/in%20side?")
    sentinel.Store("artifacts", store.url).create_sentinel(INSTALLATION)

    delete(objects(store), "a/1")

    assert store.uploads() == {("a/1", outside)}


@whole_only
@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (503, "SlowDown")])
def test_a_store_that_refuses_keeps_no_object_and_is_asked_once(s3, objects, status, code):
    s3.put(*PATHS)
    s3.proxy.answer(status, code, kinds=["uploads"])
    opened = objects(s3)

    with capture_logs() as logs:
        for path in PATHS:
            delete(opened, path)

    assert s3.keys() == set()
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("unfinished uploads not aborted", f"{status} {code}")
    ]


def test_a_store_that_does_not_answer_about_uploads_keeps_no_object(s3, objects):
    s3.put("a/1")
    s3.proxy.hang("uploads")

    delete(objects(s3, request_timeout=timedelta(seconds=0.2)), "a/1")

    assert s3.keys() == set()


def test_without_our_sentinel_no_upload_is_aborted(s3, objects):
    s3.begin_upload("a/1")
    s3.remove_sentinel()

    with pytest.raises(StoreUnavailable):
        delete(objects(s3), "a/1")

    assert (len(s3.uploads()), s3.proxy.counts["uploads"]) == (1, 0)
