"""An act of the console does what its form has shown, and no more, whatever has changed until it is sent."""

import html
import re
from urllib.parse import urlencode

import pytest

from demo import sample_data as sample
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination import leases as locks
from tests.harness.thorough import whole_only

BATCH, UPLOADS, LEASE = "user_status_cleanup", "stale_direct_uploads", "refs:7"
PASSWORD = "correct horse"

pytestmark = pytest.mark.usefixtures("database")


class Form:
    """A form that a person has opened, and sends some time later as it is but for the reason."""

    def __init__(self, console, cookie, name, of):
        self._console, self._cookie, self._name = console, cookie, name
        text = console.get(f"/act/{name}?{urlencode(of, doseq=True)}", Cookie=cookie).text.partition("<main")[2]
        self.text = text
        inputs = [dict(re.findall(r'(\w+)="(.*?)"', one)) for one in re.findall(r"<input ([^>]*)>", text)]
        self.fields = [(one["name"], html.unescape(one["value"])) for one in inputs if one["name"] != "reason"]

    def send(self, **changed):
        fields = [(name, changed.pop(name, text)) for name, text in self.fields]
        return self._console.post(
            f"/act/{self._name}", [*fields, ("reason", "I looked"), *changed.items()], Cookie=self._cookie
        )


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    made = LineFile(tmp_path_factory.mktemp("users") / "users", USER_FORMAT)
    with made.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password(PASSWORD))
    return made.path


@pytest.fixture
def opened(shared, users):
    """Open a form as an operator."""

    def look(name, /, redis_url=None, **of):
        given = {} if redis_url is None else {"redis_url": redis_url}
        console = shared(console_users=users, console_actions="on", **given)
        return Form(console, console.log_in("anna", PASSWORD), name, of)

    return look


def failed(*keys):
    for key in keys * 2:
        quarantine.record_failure(BATCH, "user_status", key, "it is bad", reason="record_failed")


def test_a_release_is_of_the_number_shown_whatever_becomes_due_until_it_is_sent(opened):
    sample.add_statuses(5)
    Hold.add(BATCH, "breaker", reason="too much", by="a run")
    form = opened("release", batch=BATCH)
    sample.add_statuses(500)

    assert form.send().status == 303
    assert ("expect", "2") in form.fields
    assert Batch.get(name=BATCH).released_expect == 2


@whole_only
def test_what_nobody_can_count_is_released_by_a_number_that_somebody_types_alone(opened):
    Hold.add(UPLOADS, "breaker", reason="too much", by="a run")
    form = opened("release", batch=UPLOADS, redis_url="redis://127.0.0.1:1/0")

    untyped, typed = form.send(), form.send(expect="7")

    assert (("expect", "") in form.fields, untyped.status, typed.status) == (True, 422, 303)
    assert Batch.get(name=UPLOADS).released_expect == 7


def test_the_form_of_a_release_names_the_batch_that_is_released_with_it(opened):
    Hold.add("expired_job_artifacts", "new", by="migrate", reason="new")
    Hold.add("delete_objects", "new", by="migrate", reason="new")

    assert (
        "delete_objects is released, too, if it has no due records yet"
        in opened("release", batch="expired_job_artifacts").text
    )


def test_a_link_cannot_put_another_number_into_the_form(opened):
    Hold.add(BATCH, "breaker", reason="too much", by="a run")

    assert ("expect", "0") in opened("release", batch=BATCH, expect="999999").fields


@pytest.mark.parametrize("act", ["retry", "discard"])
def test_of_all_in_quarantine_nothing_is_done_once_more_are_there_than_were_shown(opened, act):
    failed("1", "2")
    form = opened(act, all="on", batch=BATCH)
    failed("3")

    refused = form.send(count="2")

    assert (refused.status, "there are 3 entries now, not 2: nothing was changed" in refused.text) == (409, True)
    waits = quarantine.find_failed_keys(BATCH, "user_status", ["1", "2", "3"])
    assert (list(waits.values()), Quarantined.select().count()) == ([True] * 3, 3)


def test_a_stop_that_comes_after_the_form_is_not_ended_by_it(opened):
    Hold.add(BATCH, "pause", reason="a move", by="ops")
    form = opened("resume", batch=BATCH)
    Hold.add(BATCH, "stop", reason="it deletes too much", by="ops")

    assert form.send(by="ops").status == 303
    assert [hold.kind for hold in Hold.list_active()] == ["stop"]


def test_a_lease_that_has_another_holder_by_now_stays(opened):
    client.set(f"{locks.LEASE_KEY_PREFIX}{LEASE}", "0123 1790000000 forge-2:77", ex=60)
    form = opened("break", lease=LEASE)
    client.set(f"{locks.LEASE_KEY_PREFIX}{LEASE}", "4567 1790000100 forge-3:88", ex=60)

    refused = form.send()

    assert (refused.status, "forge-3:88 holds it since" in refused.text) == (409, True)
    assert client.exists(f"{locks.LEASE_KEY_PREFIX}{LEASE}")
