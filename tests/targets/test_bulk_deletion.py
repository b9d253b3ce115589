"""Bulk deletion at stores as they really are: without it, with answers that name a part of the keys, and signed."""

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from forgekeeper.targets import objects as module
from forgekeeper.targets import sentinel
from forgekeeper.targets.outcomes import OBJECT_DELETED, StoreUnavailable
from tests.harness.installation import INSTALLATION
from tests.harness.thorough import whole_only

TEN = [f"a/{number}" for number in range(10)]
REFUSALS = [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MissingContentMD5"), (403, "AccessDenied")]


@whole_only
@pytest.mark.parametrize(("status", "code"), REFUSALS, ids=str)
@pytest.mark.parametrize("paths", [["a"], TEN], ids=["one", "ten"])
def test_at_a_store_that_refuses_bulk_deletion_each_object_is_deleted_singly(s3, objects, status, code, paths):
    s3.put(*paths, "bystander")
    s3.proxy.answer(status, code, kinds=["bulk"])

    outcomes = objects(s3).delete(paths)

    assert (outcomes, s3.keys()) == (dict.fromkeys(paths, OBJECT_DELETED), {"bystander"})


def test_a_refusal_of_bulk_deletion_is_remembered_and_said_once(s3, objects):
    s3.put(*TEN, *(f"{path}+" for path in TEN))
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])
    opened = objects(s3)

    with capture_logs() as logs:
        opened.delete(TEN)
        opened.delete([f"{path}+" for path in TEN])

    assert (s3.keys(), s3.proxy.counts["bulk"]) == (set(), 1)
    assert [(line["location"], line["reason"]) for line in logs] == [("artifacts", "501 NotImplemented")]


def test_after_an_hour_bulk_deletion_is_tried_again(s3, objects, monkeypatch):
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"], times=1)
    opened = objects(s3)
    opened.delete(TEN)

    clock = SimpleNamespace(now=module.time.monotonic())
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    clock.now += module.SUSPENSION_SECONDS + 1
    opened.delete(TEN)

    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (2, 10)


def test_a_store_that_keeps_these_objects_is_not_taken_for_one_without_bulk_deletion(s3, objects):
    for path in TEN:
        s3.proxy.refuse_key(path, "AccessDenied")
    opened = objects(s3)

    outcomes = opened.delete(TEN)

    assert ({outcome.state for outcome in outcomes.values()}, opened.can_delete_in_bulk()) == ({"failed"}, True)


@whole_only
@pytest.mark.parametrize("named", [0, 5])
@pytest.mark.parametrize("deleted", [5, 10])
def test_an_object_that_the_answer_does_not_name_is_deleted_singly(s3, objects, named, deleted):
    s3.put(*TEN, "bystander")
    s3.proxy.name_in_bulk(named, delete=deleted)

    outcomes = objects(s3).delete(TEN)

    assert (outcomes, s3.keys()) == (dict.fromkeys(TEN, OBJECT_DELETED), {"bystander"})
    assert s3.proxy.counts["single"] == 10 - named


def test_an_object_that_the_answer_names_as_failed_fails_and_keeps_no_other(s3, objects):
    s3.put(*TEN)
    s3.proxy.refuse_key(TEN[3], "AccessDenied")

    outcomes = objects(s3).delete(TEN)

    assert s3.keys() == {TEN[3]}
    assert {path for path, outcome in outcomes.items() if outcome == OBJECT_DELETED} == {*TEN} - {TEN[3]}
    assert outcomes[TEN[3]].state == "failed"


BOTH = "<DeleteResult><Deleted><Key>a/0</Key></Deleted><Error><Key>a/0</Key></Error></DeleteResult>"


@whole_only
@pytest.mark.parametrize("body", ["", "<html></html>", "<DeleteResult><Deleted>", "<!DOCTYPE a><DeleteResult/>", BOTH])
def test_an_answer_that_makes_no_sense_names_nothing(s3, objects, body):
    s3.put(*TEN)
    s3.proxy.answer_body(200, body, kinds=["bulk"])

    assert (objects(s3).delete(TEN), s3.keys()) == (dict.fromkeys(TEN, OBJECT_DELETED), set())


def test_an_option_of_the_url_switches_bulk_deletion_off(s3, objects):
    s3.url += "&disable_bulk_delete=true"

    objects(s3).delete(TEN)

    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (0, 10)


@pytest.mark.usefixtures("machine_role")
def test_with_keys_that_the_client_fetches_from_the_machine_each_object_is_deleted_singly(s3, objects):
    s3.put(*TEN)

    assert (objects(s3).delete(TEN), s3.keys()) == (dict.fromkeys(TEN, OBJECT_DELETED), set())
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (0, 10)


def test_keys_of_the_environment_sign_like_those_of_the_url(s3, objects, monkeypatch):
    s3.put(*TEN)
    s3.url = s3.url.partition("&access_key_id")[0]
    given = {"ACCESS_KEY_ID": "AKIA", "SECRET_ACCESS_KEY": s3.secret, "SESSION_TOKEN": "t/o=ken"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)

    assert (objects(s3).delete(TEN), s3.keys()) == (dict.fromkeys(TEN, OBJECT_DELETED), set())
    assert [headers["x-amz-security-token"] for headers in s3.proxy.headers["bulk"]] == ["t/o=ken"]


def test_a_wrong_key_deletes_nothing(s3, objects):
    s3.put(*TEN)
    opened = objects(s3)
    s3.proxy.secret = "another"

    with pytest.raises(StoreUnavailable):
        opened.delete(TEN)

    assert s3.keys() == {*TEN}


def test_the_folder_in_a_url_is_the_beginning_of_every_key(s3, objects):
    s3.put("in side/ü/a&b", "a&b", "in side/ü/c", "c")
    s3.url = s3.url.replace("?", "/in%20side/ü?")
    sentinel.Store("artifacts", s3.url).create_sentinel(INSTALLATION)

    assert objects(s3).delete(["a&b", "c"]) == {"a&b": OBJECT_DELETED, "c": OBJECT_DELETED}
    assert s3.keys() == {"a&b", "c", "in side/ü/.forgekeeper-root"}
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (1, 0)


def test_bulk_deletions_go_through_the_proxy_of_the_url(s3, objects, moto):
    s3.put(*TEN)
    s3.url = s3.url.replace(s3.proxy.url, moto) + f"&proxy_url={s3.proxy.url}"

    assert (objects(s3).delete(TEN), s3.keys()) == (dict.fromkeys(TEN, OBJECT_DELETED), set())
    assert s3.proxy.counts["bulk"] == 1
