"""Our rules for names of refs are git's, and git sees no other name."""

import subprocess

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgekeeper.storage.git_refs import DELETED, Doomed, Outcome
from forgekeeper.storage.git_values import refusal
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


def test_names_that_git_must_not_see_are_rejected_and_keep_no_other(repository):
    repository.loose("refs/a", "refs/z")
    (repository.path / "FETCH_HEAD").write_text(repository.one)
    elsewhere = ["", "HEAD", "FETCH_HEAD", "main", "refs", "Refs/x", "/refs/x", " refs/x", "\ud800"]
    invalid = ["refs/heads/x\0refs/heads/main", "refs/heads/x\ncreate refs/heads/evil HEAD", "refs/heads/\udcff"]
    bad = dict.fromkeys(elsewhere, "not_under_refs") | dict.fromkeys(invalid, "invalid_name")

    outcomes = repository.delete("refs/a", *bad, "refs/z")

    assert {name: outcomes[Doomed(name)] for name in bad} == {
        name: Outcome("rejected", reason) for name, reason in bad.items()
    }
    assert outcomes[Doomed("refs/a")] == outcomes[Doomed("refs/z")] == DELETED
    assert repository.refs() == {"refs/heads/main": repository.one}
    assert (repository.path / "HEAD").exists()
    assert (repository.path / "FETCH_HEAD").exists()
