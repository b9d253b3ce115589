"""The file of users: what it may say, who may read it, and that nobody sees half of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from forgekeeper.cli.console.named_lines import LineFile, is_valid_name
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password, is_correct_password
from forgekeeper.cli.terminal import Problem
from tests.harness.every import every
from tests.harness.thorough import whole_only

HASH = hash_password("correct horse")
ANNA = User("anna", "operator", HASH)


@pytest.fixture
def users(tmp_path):
    made = LineFile(tmp_path / "users", USER_FORMAT)
    with made.edit_lines() as known:
        known["anna"] = ANNA
    return made


def test_a_line_is_a_user(users):
    users.path.write_text(f"anna:operator:{HASH}\n\n  vera@example.com:viewer:-  \n")

    assert users.read_lines() == {"anna": ANNA, "vera@example.com": User("vera@example.com", "viewer", "-")}


WRONG = [
    "anna",
    f"anna:admin:{HASH}",
    f":viewer:{HASH}",
    f"{'x' * 101}:viewer:-",
    "anna:viewer:",
    "anna:viewer:swordfish",
    "vera:operator:-",
]


@every("line", WRONG)
def test_a_line_that_is_none_is_named_by_its_number_with_what_to_do_and_never_repeated(users, line):
    users.path.write_text(f"vera:viewer:-\n{line}\n")

    with pytest.raises(Problem) as refused:
        users.read_lines()

    form = "write name:role:hash, or run `forgekeeper console user add`"
    assert str(refused.value) == f"line 2 of {users.path} is not a user, or repeats a user: {form}"


def test_a_file_that_is_not_there_is_said_with_what_makes_it(tmp_path):
    with pytest.raises(Problem, match=r"there is no .*: `forgekeeper console user add` creates it"):
        LineFile(tmp_path / "none", USER_FORMAT).read_lines()


def test_a_file_that_is_no_text_is_said(users):
    users.path.write_bytes(b"\xff")

    with pytest.raises(Problem, match=r"cannot read the users in .*: it is not UTF-8; fix the file"):
        users.read_lines()


def test_a_file_that_others_may_write_is_refused(users):
    users.path.chmod(0o620)

    with pytest.raises(Problem, match=r"others may write .*: run `chmod 600 "):
        users.read_lines()


def test_only_its_owner_may_read_it(users):
    assert users.path.stat().st_mode & 0o777 == 0o600


def test_those_who_change_it_at_once_take_nothing_from_one_another(users):
    def add(number):
        with users.edit_lines() as known:
            known[f"u{number}"] = User(f"u{number}", "viewer", "-")

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(add, range(20)))

    assert len(users.read_lines()) == 21


def test_a_change_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(users):
    with pytest.raises(AttributeError), users.edit_lines() as known:
        known["vera"] = None

    assert list(users.read_lines()) == ["anna"]
    assert [file.name for file in users.path.parent.iterdir()] == ["users"]


def test_a_link_leads_to_the_file_after_a_change_too(users, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(users.path)

    with LineFile(link, USER_FORMAT).edit_lines() as known:
        known["vera"] = User("vera", "viewer", "-")

    assert (link.is_symlink(), list(users.read_lines())) == (True, ["anna", "vera"])


@every(
    "name, good", [("anna", True), ("Jörg Müller", True), ("a@b.c", True), ("", False), ("a:b", False), (" a", False)]
)
def test_a_name_has_no_colon_and_no_space_around_it(name, good):
    assert is_valid_name(name) is good


@every("name", ["a\n", "a\x1b[2J", "a\u202eb", "x" * 101])
def test_a_name_can_be_printed(name):
    assert not is_valid_name(name)


@whole_only
@every(
    "user, password, right",
    [
        (ANNA, "correct horse", True),
        (ANNA, "correct horse ", False),
        (ANNA, "", False),
        (ANNA._replace(hash="-"), "-", False),
        (None, "correct horse", False),
    ],
)
def test_a_password_is_that_of_its_user_alone(user, password, right):
    assert is_correct_password(user, password) is right
