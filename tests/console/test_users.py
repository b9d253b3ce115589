"""The file of users: what it may say, who may read it, and that nobody sees half of it."""

import threading

import pytest

from forgekeeper.cli.terminal import Problem
from forgekeeper.console.users import User, Users, fits, hashed_password, is_password
from tests.harness.every import every

HASH = hashed_password("correct horse")
ANNA = User("anna", "operator", HASH)


@pytest.fixture
def users(tmp_path):
    made = Users(tmp_path / "users")
    with made.changed() as known:
        known["anna"] = ANNA
    return made


def test_a_line_is_a_user(users):
    users.path.write_text(f"anna:operator:{HASH}\n\n  vera@example.com:viewer:-  \n")

    assert users.known() == {"anna": ANNA, "vera@example.com": User("vera@example.com", "viewer", "-")}


WRONG = {
    "anna": "is no user with the role viewer or operator",
    f"anna:admin:{HASH}": "is no user with the role viewer or operator",
    f":viewer:{HASH}": "is no user with the role viewer or operator",
    f"{'x' * 101}:viewer:-": "is no user with the role viewer or operator",
    "anna:viewer:": "has no hash of argon2",
    "anna:viewer:swordfish": "has no hash of argon2",
    f"anna:viewer:{HASH[:20]}": "has no hash of argon2",
}


@every("line", WRONG)
def test_a_line_that_is_none_is_named_by_its_number_with_what_to_do_and_never_repeated(users, line):
    users.path.write_text(f"vera:viewer:-\n{line}\n")

    with pytest.raises(Problem) as refused:
        users.known()

    form = "write name:role:hash, or run `forgekeeper console user add`"
    assert str(refused.value) == f"line 2 of {users.path} {WRONG[line]}: {form}"


def test_a_user_who_is_named_twice_is_an_error(users):
    users.path.write_text("vera:viewer:-\nvera:operator:-\n")

    with pytest.raises(Problem, match=r"line 2 of .* names vera again: remove one of the two"):
        users.known()


def test_a_file_that_is_not_there_is_said_with_what_makes_it(tmp_path):
    with pytest.raises(Problem, match=r"there is no .*: `forgekeeper console user add` makes it"):
        Users(tmp_path / "none").known()


def test_a_file_that_is_no_text_is_said(users):
    users.path.write_bytes(b"\xff")

    with pytest.raises(Problem, match=r"cannot read the users in .*: it is not UTF-8; correct that"):
        users.known()


def test_a_file_that_others_may_write_is_refused(users):
    users.path.chmod(0o620)

    with pytest.raises(Problem, match=r"others may write .*: run `chmod 600 "):
        users.known()


def test_only_its_owner_may_read_it(users):
    assert users.path.stat().st_mode & 0o777 == 0o600


def test_a_change_by_another_is_seen_at_once(users):
    other = Users(users.path)
    assert list(other.known()) == ["anna"]

    with users.changed() as known:
        known["vera"] = User("vera", "viewer", "-")

    assert list(other.known()) == ["anna", "vera"]


def test_a_file_that_has_not_changed_is_not_read_again(users):
    assert users.known() is users.known()


def test_those_who_change_it_at_once_take_nothing_from_one_another(users):
    def add(number):
        with Users(users.path).changed() as known:
            known[f"u{number}"] = User(f"u{number}", "viewer", "-")

    threads = [threading.Thread(target=add, args=[number]) for number in range(20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    assert len(users.known()) == 21


def test_a_change_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(users):
    with pytest.raises(TypeError), users.changed() as known:
        known["vera"] = None

    assert list(users.known()) == ["anna"]
    assert [file.name for file in users.path.parent.iterdir()] == ["users"]


def test_a_link_leads_to_the_file_after_a_change_too(users, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(users.path)

    with Users(link).changed() as known:
        known["vera"] = User("vera", "viewer", "-")

    assert (link.is_symlink(), list(users.known())) == (True, ["anna", "vera"])


@every(
    "name, good", [("anna", True), ("Jörg Müller", True), ("a@b.c", True), ("", False), ("a:b", False), (" a", False)]
)
def test_a_name_has_no_colon_and_no_space_around_it(name, good):
    assert fits(name) is good


@every("name", ["a\n", "a\x1b[2J", "a\u202eb", "x" * 101])
def test_a_name_can_be_printed(name):
    assert not fits(name)


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
    assert is_password(user, password) is right
