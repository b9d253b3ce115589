"""Deletion on S3 and in a local store: what fails, what is believed without the sentinel, which paths and URLs it takes."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import obstore
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forgekeeper.targets import sentinel
from forgekeeper.targets.objects import MAX_CONCURRENT_LOOKUPS, ObjectStore, is_normal
from forgekeeper.targets.outcomes import OBJECT_DELETED, OBJECT_MISSING, ObjectOutcome, StoreUnavailable
from forgekeeper.targets.store_urls import describe_error
from tests.harness.clocks import JUMP_SECONDS
from tests.harness.installation import INSTALLATION
from tests.harness.thorough import examples, whole_only


def numbered(count):
    return [f"{number % 100:02}/{number:05}" for number in range(count)]


def unavailable(objects, paths, **options):
    with pytest.raises(StoreUnavailable) as caught:
        objects.delete(paths, **options)
    return caught.value


def test_thousands_of_objects_take_one_request_per_thousand(s3, objects):
    paths = numbered(2_500)
    s3.put(*paths[::50], "bystander")  # what was never there is deleted as well

    outcomes = objects(s3).delete(paths)

    assert s3.keys() == {"bystander"}
    assert outcomes == dict.fromkeys(paths, OBJECT_DELETED)
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (3, 0)


def test_a_failed_bulk_deletion_is_repeated_object_by_object(s3, objects):
    s3.put("a", "b")
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])

    outcomes = objects(s3).delete(["a", "b"])

    assert s3.keys() == set()
    assert outcomes == {"a": OBJECT_DELETED, "b": OBJECT_DELETED}


@pytest.mark.parametrize("kinds", [["head"], ["bulk"], ["bulk", "single"]])
def test_a_store_that_is_busy_for_a_moment_is_asked_again(s3, objects, kinds):
    s3.put("a", "b")
    s3.proxy.answer(503, "SlowDown", kinds=kinds, times=2)

    outcomes = objects(s3).delete(["a", "b"])

    assert s3.keys() == set()
    assert outcomes == {"a": OBJECT_DELETED, "b": OBJECT_DELETED}


@pytest.mark.parametrize(
    "content",
    [sentinel.build_content("d15c0"), sentinel.SENTINEL_TEXT, b"", b"installation:\n"],
    ids=["another's", "old", "empty", "no id"],
)
def test_a_store_that_is_not_this_installation_s_is_left_alone(store, objects, content):
    store.put("a", "b")
    store.write_sentinel(content)

    with pytest.raises(StoreUnavailable, match="installation") as caught:
        objects(store).delete(["a", "b"])

    assert (caught.value.confirmed, caught.value.began, store.keys()) == ({}, False, {"a", "b"})


@whole_only
@pytest.mark.parametrize("content", [None, sentinel.build_content("d15c0")], ids=["no sentinel", "another's"])
def test_a_bucket_in_whose_place_another_comes_meanwhile_loses_no_more(s3, objects, content):
    paths = numbered(2_500)
    s3.put(*paths[::50])
    s3.proxy.before("bulk", 2, lambda: s3.remove_sentinel() if content is None else s3.write_sentinel(content))

    error = unavailable(objects(s3), paths)

    # What the second request said is not believed, and there was no third.
    assert (error.confirmed, error.began) == (dict.fromkeys(paths[:1_000], OBJECT_DELETED), True)
    assert s3.keys() == set(paths[2_000::50])


def test_what_was_known_when_the_time_is_up_is_told(s3, objects, jump):
    paths = numbered(2_500)
    s3.proxy.before("bulk", 2, jump)

    outcomes = objects(s3).delete(paths, until=time.monotonic() + JUMP_SECONDS / 2)

    assert outcomes == dict.fromkeys(paths[:1_000], OBJECT_DELETED)


@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_process_that_was_stopped_until_its_time_was_up_asks_for_no_deletion(s3, objects, jump, monkeypatch, in_bulk):
    s3.put("a", "b")
    # The last step before the first deletion.
    monkeypatch.setattr(ObjectStore, "can_delete_in_bulk", lambda _objects: jump() or in_bulk)

    assert objects(s3).delete(["a", "b"], until=time.monotonic() + JUMP_SECONDS / 2) == {}
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (0, 0)


def test_what_an_error_says_is_one_short_line_without_secrets(s3, objects):
    path = "long/" * 150 + "path"
    s3.proxy.answer(403, "AccessDenied")

    said = str(unavailable(objects(s3), [path]))
    s3.proxy.answer(200, "", times=0)
    s3.proxy.refuse_key(path, "AccessDenied")
    why = objects(s3).delete([path])[path].reason

    assert len(why) <= 200
    assert "\n" not in said + why
    assert s3.secret not in said + why
    assert "AccessDenied" in why


# Paths that are normal, and mean the same object everywhere

LONG = "/".join(["ü" * 100] * 5) + "/" + "x" * 19
assert len(LONG.encode()) == 1_024

NOT_NORMAL = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "./a", "../a", "a/.", "a/..", "a/../b", "a/./b"),
    *(f"a{unfit}b" for unfit in "\0\n\r\t\x1f\x7f\x85\ud800\ufffe\uffff"),
    *("a#1", "a/b#123"),
    *(".forgekeeper-root", "a/.forgekeeper-root", "a/.forgekeeper-probe", ".forgekeeper-root/a"),
    *(LONG + "x", "x" * 1_025, "ü" * 513),
]

# Letters that are special to somebody, and any others.
LETTERS = st.one_of(st.sampled_from(list("ab./:#%+?&=<>\"'\\ ~*0189\ufffe\n")), st.characters())
PATHS = st.lists(st.text(LETTERS, max_size=30), min_size=1, max_size=5).map("/".join)


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
# The library cannot delete a file whose name ends with a colon: it stays, and is a failure that people see.
@whole_only
@given(path=PATHS.filter(lambda path: is_normal(path) and not path.endswith(":")))
@example(path="a%2Fb#0x/\u2028/ ")
@example(path="e\u0301 stays/a#1/100%/%2e%2e/what?x=y/<b>&amp;'\"/back\\slash")
@example(path="~/*|{}[]^`$!/.../..a/.b/.forgekeeper-root2")
@example(path=LONG[:-1])
def test_whatever_is_normal_means_one_object_alone(store, objects, path):
    twin = path + "+"
    store.put(path, twin)
    assert store.keys() == {path, twin}

    outcomes = objects(store).delete([path])

    assert outcomes == {path: OBJECT_DELETED}
    assert store.keys() == {twin}
    objects(store).delete([twin])
    store.remove_folders()


def test_paths_that_are_not_normal_never_reach_the_store(s3, objects):
    outcomes = objects(s3).delete(NOT_NORMAL)

    assert outcomes == dict.fromkeys(NOT_NORMAL, ObjectOutcome("failed", "invalid path"))
    assert s3.proxy.counts.total() == 0


# How URLs of stores are read


def refusal(url):
    with pytest.raises(StoreUnavailable) as caught:
        ObjectStore("artifacts", url, installation=INSTALLATION)
    return str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_unknown_option_is_refused_by_its_name_and_without_its_value(scheme):
    said = refusal(f"{scheme}://bucket?secret_acces_key=hush&allow_http=true")

    assert "unknown option secret_acces_key" in said
    assert "hush" not in said + refusal(f"{scheme}://bucket?secret_access_key=a&hush")


@pytest.mark.parametrize("url", ["s3://AKIA:hush@bucket/prefix", "s3://bucket?secret_access_key=hu#sh"])
def test_a_key_in_the_wrong_place_is_refused_without_repeating_it(url):
    said = refusal(url)

    assert "percent-encoded" in said
    assert "hu" not in said


def test_a_key_may_contain_plus_and_slash_and_percent_encoded_letters():
    opened = ObjectStore(
        "artifacts", "s3://bucket?access_key_id=AKIA&secret_access_key=a+b/c=%23%26", installation=INSTALLATION
    )

    assert opened.store.config["secret_access_key"] == "a+b/c=#&"


def test_a_prefix_keeps_to_itself(s3):
    s3.put("inside/a", "a")
    inside = s3.url.replace("?", "/inside?")
    sentinel.Store("artifacts", inside).create_sentinel(INSTALLATION)

    ObjectStore("artifacts", inside, installation=INSTALLATION).delete(["a"])

    assert s3.keys() == {"a", "inside/.forgekeeper-root"}


def test_a_reason_leaves_out_what_an_address_carries_behind_its_question_mark():
    said = describe_error(
        ValueError("Error performing DELETE https://host/c/b?sv=1&sig=hush in 3.1ms - denied\nDebug source")
    )

    assert said == "Error performing DELETE https://host/c/b - denied"


# In a local store: a disk can vanish, and a name can lead elsewhere

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
# Uses a store, forks, and lets the child use it, then lets it open the store again.
FORK = """
import os, signal, sys
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.sentinel import Store
url, installation = sys.argv[1:]
parents = ObjectStore("artifacts", url, installation=installation)
parents.delete(["a"])
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(10)
for use in (lambda: parents.delete(["b"]), lambda: ObjectStore("artifacts", url, installation=""), lambda: Store("artifacts", url)):
    try:
        use()
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""
# Has memory for what it does, but not for the stack of one more thread.
NO_THREAD = """
import resource, sys
from pathlib import Path
from forgekeeper.targets.sentinel import Store
store = Store("artifacts", sys.argv[1])
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 1_500_000, resource.RLIM_INFINITY))
store.read_owner()
"""


def in_a_child(program, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=LIMIT)


def test_missing_objects_keep_no_other(folder, objects):
    paths = numbered(1_500)
    folder.put(*paths[1::2], "bystander")

    outcomes = objects(folder).delete(paths)

    assert folder.keys() == {"bystander"}
    assert outcomes == dict.fromkeys(paths[::2], OBJECT_MISSING) | dict.fromkeys(paths[1::2], OBJECT_DELETED)


@whole_only
def test_nothing_is_missing_after_the_root_goes_in_the_middle(folder, objects, monkeypatch):
    paths = numbered(2_000)
    folder.put(*paths)
    elsewhere = folder.root.with_name("unmounted")
    delete, asked = obstore.delete_async, count(1)

    def delete_or_unmount(store, path):
        if next(asked) == 1_500:
            folder.root.rename(elsewhere)
        return delete(store, path)

    monkeypatch.setattr(obstore, "delete_async", delete_or_unmount)
    with pytest.raises(StoreUnavailable) as caught:
        objects(folder).delete(paths)
    folder.root = elsewhere

    assert caught.value.confirmed.items() <= dict.fromkeys(set(paths) - folder.keys(), OBJECT_DELETED).items()
    assert len(caught.value.confirmed) >= 1_000


@pytest.mark.parametrize("name", ["outside", "the root-old"])
def test_a_link_that_leads_out_of_the_store_is_not_followed(folder, objects, name):
    outside = folder.root.with_name(name)
    outside.mkdir()
    (outside / "precious").touch()
    (folder.root / "linked").symlink_to(outside)

    outcomes = objects(folder).delete(["linked/precious", "linked/missing"])

    assert (outside / "precious").exists()
    assert {outcome.state for outcome in outcomes.values()} == {"failed"}


def test_a_link_within_a_folder_does_not_lead_out_of_it(folder, objects):
    folder.put("up/a", "backup/precious")
    (folder.root / "up/linked").symlink_to(folder.root / "backup")
    (folder.root / "aside").symlink_to(folder.root / "up")

    outcomes = objects(folder, prefixes=["up"]).delete(["up/linked/precious", "aside/a", "up/a"])

    assert [outcome.state for outcome in outcomes.values()] == ["failed", "failed", "deleted"]
    assert (folder.root / "backup/precious").exists()


def test_an_object_that_is_a_link_goes_without_what_it_leads_to(folder, objects, tmp_path):
    (tmp_path / "precious").touch()
    (folder.root / "a").symlink_to(tmp_path / "precious")

    objects(folder).delete(["a"])

    assert folder.keys() == set()
    assert (tmp_path / "precious").exists()


@pytest.fixture
def silent(folder):
    """Return a folder that does not answer who wants to read its sentinel."""
    fifo = folder.root / sentinel.SENTINEL_NAME
    fifo.unlink()
    os.mkfifo(fifo)
    yield folder
    # What still waits for somebody to write goes.
    os.close(os.open(fifo, os.O_RDWR))


def test_a_folder_that_does_not_answer_has_failed_once_the_time_for_a_request_is_over(silent, objects):
    asked = objects(silent, request_timeout=timedelta(seconds=0.2))

    assert "TimeoutError" in str(unavailable(asked, ["a"], until=time.monotonic() + 20))


def test_whose_a_folder_is_that_does_not_answer_cannot_be_read(silent, monkeypatch):
    monkeypatch.setattr(sentinel, "PLACE_TIMEOUT", timedelta(seconds=0.1))

    with pytest.raises(sentinel.PlaceUnreadable, match="TimeoutError"):
        sentinel.Store("artifacts", silent.url).read_owner()


def test_a_process_that_has_no_thread_as_it_first_asks_a_store_ends_itself(folder):
    child = in_a_child(NO_THREAD, folder.url)

    assert child.returncode == -signal.SIGTERM, child.stderr


@whole_only
def test_a_forked_child_is_told_instead_of_left_hanging(folder):
    child = in_a_child(FORK, folder.url, INSTALLATION)

    assert child.returncode == 0, child.stderr
    assert child.stdout.count("before it forked") == 3


@whole_only
def test_objects_that_are_there_are_told_from_those_that_are_not(store, objects):
    paths = [f"a/{number}" for number in range(2 * MAX_CONCURRENT_LOOKUPS + 1)]
    store.put(*paths[::2])

    assert objects(store).check_present(paths) == {path: number % 2 == 0 for number, path in enumerate(paths)}


@pytest.mark.parametrize("content", [None, sentinel.build_content("d15c0")], ids=["no sentinel", "another's"])
def test_without_our_sentinel_nothing_is_believed_to_be_gone(store, objects, content):
    store.remove_sentinel() if content is None else store.write_sentinel(content)

    with pytest.raises(StoreUnavailable):
        objects(store).check_present(["a"])
