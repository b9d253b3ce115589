"""Acts: who is named, what is kept of them, and that they stand and fall with the transaction."""

import getpass
import os
import pwd
import socket

import pytest

from forgekeeper.audit import acts
from forgekeeper.audit.acts import Act
from tests.harness.thorough import whole_only

pytestmark = pytest.mark.usefixtures("database")
ME = pwd.getpwuid(os.getuid()).pw_name


def only():
    return Act.select().get()


@pytest.fixture(autouse=True)
def without_sudo(monkeypatch):
    monkeypatch.delenv("SUDO_USER", raising=False)


@whole_only
def test_an_act_says_who_did_what_to_what_and_why():
    with acts.recording_acts(actor="Anna", on=True):
        acts.record_act(
            "flags on", "a_flag", batch="prune", reason="it is time", before={"on": False}, after={"on": True}
        )

    act = only()
    assert (act.act, act.what, act.batch, act.reason) == ("flags on", "a_flag", "prune", "it is time")
    assert (act.by_user, act.by_host, act.actor) == (ME, socket.gethostname(), "Anna")
    assert (act.before, act.after) == ({"on": False}, {"on": True})


@pytest.mark.parametrize(("given", "kept"), [(None, "it is time"), ("of its own", "of its own")])
def test_an_act_without_a_reason_has_that_of_all_acts(given, kept):
    with acts.recording_acts(actor="Anna", on=True, reason="it is time"):
        acts.record_act("send", "run 1", reason=given)

    assert only().reason == kept


def test_whoever_is_behind_sudo_is_named(monkeypatch):
    monkeypatch.setenv("SUDO_USER", "anna")

    assert acts.name_actor() == f"{ME} (sudo by anna)@{socket.gethostname()}"


def test_the_environment_s_user_is_not_believed(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody_else")
    assert getpass.getuser() == "somebody_else"

    assert acts.name_actor() == f"{ME}@{socket.gethostname()}"


def test_an_act_goes_with_its_transaction(database):
    with database.atomic() as transaction:
        acts.record_act("run", "run 1")
        transaction.rollback()

    assert Act.select().count() == 0


@pytest.mark.parametrize("text", ["a\nb\x1b[2J\x00", "\ud800"])
def test_control_characters_of_what_a_person_types_are_escaped(text):
    acts.record_act("pause", text, reason=text)

    assert only().reason.isprintable()
    assert only().what.isprintable()


def test_secrets_in_a_reason_are_masked():
    acts.record_act("pause", "prune", reason="password=hunter2", after={"token": "hunter2"})

    assert "hunter2" not in only().reason + str(only().after)
