"""Our rules for names of refs are git's, and git sees no other name."""

import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgekeeper.storage.git_refs import Doomed, Outcome
from forgekeeper.storage.git_repository import refusal
from tests.harness.thorough import examples

LETTERS = st.one_of(
    st.sampled_from(list("ab.@{/-~^:?*[\\ \x7f\x1f\n")),
    st.sampled_from([".lock", "..", "@{", "//", "/.", "ü", "refs"]),
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
)


def git_takes(name):
    command = ["git", "check-ref-format", name]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


@settings(max_examples=examples(700))
@given(st.lists(LETTERS, max_size=12).map(lambda parts: "refs/" + "".join(parts)))
@example("refs/x\n")
@example("refs/x.lock/y")
@example("refs/../HEAD")
def test_git_takes_exactly_the_names_that_we_do(name):
    assert (refusal(name) is None) == git_takes(name)


def test_a_name_may_be_as_long_as_the_column_and_no_longer():
    assert refusal("refs/".ljust(1_024, "ü")) is None
    assert refusal("refs/".ljust(1_025, "ü")) == "too_long"


ELSEWHERE = ["", "HEAD", "FETCH_HEAD", "main", "refs", "Refs/x", "/refs/x", " refs/x", "\ud800"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_git_sees_no_name_outside_refs(name):
    assert refusal(name) == "not_under_refs"


@pytest.mark.parametrize("name", ["refs/heads/x\0refs/heads/main", "refs/heads/\udcff"])
def test_git_sees_no_name_that_is_no_text_for_it(repository, name):
    assert repository.delete(name) == {Doomed(name): Outcome("rejected", "invalid_name")}
    assert repository.refs() == {"refs/heads/main": repository.one}
