"""Our rules for names of refs are git's."""

import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from forgekeeper.storage.ref_names import LONGEST, refusal
from tests.harness.every import every
from tests.harness.thorough import examples

LONG = "refs/" + "/".join(["ü" * 100] * 10)
assert len(LONG) <= LONGEST

INVALID = [
    "refs/",
    "refs//x",
    "refs/x/",
    "refs/x//y",
    "refs/.x",
    "refs/x/.y",
    "refs/x.",
    "refs/x..y",
    "refs/../HEAD",
    "refs/x.lock",
    "refs/x.lock/y",
    "refs/x@{1}",
    "refs/x y",
    "refs/x~1",
    "refs/x^",
    "refs/x:y",
    "refs/x?",
    "refs/x*",
    "refs/x[y",
    "refs/x\\y",
    "refs/x\ny",
    "refs/x\n",
    "refs/x\0y",
    "refs/x\ty",
    "refs/x\x1fy",
    "refs/x\x7f",
    "refs/x\ud800",
]
NOT_UNDER_REFS = ["", "HEAD", "FETCH_HEAD", "ORIG_HEAD", "main", "refs", "Refs/x", "/refs/x", " refs/x", "\ud800"]

LETTERS = st.one_of(
    st.sampled_from(list("ab.@{/-~^:?*[\\ \x7f\x1f\n")),
    st.sampled_from([".lock", "..", "@{", "//", "/.", "ü", "refs"]),
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
)


def git_takes(name):
    command = ["git", "check-ref-format", name]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


@every("name", INVALID, name=repr)
def test_an_invalid_name_is_invalid(name):
    assert refusal(name) == "invalid_name"


@every("name", NOT_UNDER_REFS, name=repr)
def test_a_name_elsewhere_is_not_under_refs(name):
    assert refusal(name) == "not_under_refs"


def test_a_name_may_be_as_long_as_the_column_and_no_longer():
    assert refusal("refs/".ljust(1_024, "ü")) is None
    assert refusal("refs/".ljust(1_025, "ü")) == "too_long"


@settings(max_examples=examples(700))
@given(st.lists(LETTERS, max_size=12).map(lambda parts: "refs/" + "".join(parts)))
def test_git_takes_exactly_the_names_that_we_do(name):
    assert (refusal(name) is None) == git_takes(name)
