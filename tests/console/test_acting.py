"""Acts of a person on the console: done as the command does, with the person and the reason in the audit, or refused."""

import html
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from demo import sample_data as sample
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.audit.acts import MAX_TEXT_LENGTH, Act
from forgekeeper.cli.console.acting import CONSOLE_ACTIONS
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination import leases as locks
from forgekeeper.platform.database import now
from tests.harness.every import every
from tests.harness.forks import run
from tests.harness.tables import empty
from tests.harness.thorough import whole_only

BATCH, FLAG, LEASE = "user_status_cleanup", "bulk_delete_job_artifacts", "refs:7"
REASON = "the disk is full"
PASSWORD = "correct horse"
HASH = hash_password(PASSWORD)
SCRIPT = "<script>alert(1)</script>"


class Operated:
    """A console as one person sees it, who has logged in."""

    def __init__(self, console, name):
        self._console, self.cookie = console, console.log_in(name, PASSWORD)

    def get(self, path, **headers):
        return self._console.get(path, Cookie=self.cookie, **headers)

    def act(self, name, /, **fields):
        return self._console.post(f"/act/{name}", {"reason": REASON, **fields}, Cookie=self.cookie)

    def said(self, answer):
        """What the page says first to which an act has led."""
        said = answer.headers["set-cookie"].partition(";")[0]
        page = self._console.get(answer.headers["location"], Cookie=f"{self.cookie}; {said}")
        (sentence,) = re.findall(r'class="notice" role="status">(.*?)</p>', page.text)
        return html.unescape(sentence)


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """The file of users: anna and otto operate, vera looks."""
    made = LineFile(tmp_path_factory.mktemp("users") / "users", USER_FORMAT)
    with made.edit_lines() as known:
        for name, role in (("anna", "operator"), ("otto", "operator"), ("vera", "viewer")):
            known[name] = User(name, role, HASH)
    return made.path


@pytest.fixture
def acting(shared, users):
    """The console on which one may act."""
    return shared(console_users=users, console_actions="on")


@pytest.fixture
def anna(acting):
    """It as Anna, who may act."""
    return Operated(acting, "anna")


@pytest.fixture
def vera(acting):
    """It as Vera, who may look."""
    return Operated(acting, "vera")


def bad():
    """Two records and a child that have failed."""
    for key in ("815", "816") * 3:
        quarantine.record_failure(BATCH, "user_status", key, "it is bad", reason="record_failed")
    quarantine.record_failure(
        "git_ref_cleanup", "clean_project_refs", "clean_project_refs:7", "no HEAD", reason="child_failed"
    )


def lease():
    client.set(f"{locks.LEASE_KEY_PREFIX}{LEASE}", "0123 1790000000 forge-2:77", ex=60)


def a_guard_hold():
    Hold.add(BATCH, "breaker", reason="it would delete all", by="forge-1:7")


def waiting_run():
    JobRun.create(batch=BATCH, state="claimed", tick="2026-11-20 08:30:00+00:00", claimed_by="a", claimed_at=now())


class Case(NamedTuple):
    """An act with its fields, what it finds, what it leaves in the audit, what it says, and what is true then.

    *seen* is what its form sends back of what it has found.
    """

    name: str
    fields: dict[str, Any]
    audit: tuple[str, str]
    says: str
    then: Any
    arrange: Any = lambda: None
    seen: tuple[tuple[str, str], ...] = ()

    def __str__(self):
        return f"{self.name} {self.fields}"


def holds():
    return [(hold.batch, hold.kind, hold.by, hold.reason) for hold in Hold.list_active()]


CASES = [
    Case(
        "pause",
        {"batch": BATCH, "until": "2h"},
        ("pause", BATCH),
        f"{BATCH} is paused until ",
        lambda: holds() == [(BATCH, "pause", "anna", REASON)] and Hold.get().until is not None,
    ),
    Case(
        "stop",
        {"batch": BATCH},
        ("stop", BATCH),
        f"{BATCH} is stopped until ",
        lambda: holds() == [(BATCH, "stop", "anna", REASON)],
    ),
    Case(
        "resume",
        {"batch": BATCH, "by": "ops:1"},
        ("resume", BATCH),
        f"{BATCH}: ended the pause of ops:1",
        lambda: holds() == [],
        lambda: Hold.add(BATCH, "pause", reason=None, by="ops:1"),
        (("hold", "1"),),
    ),
    Case(
        "release",
        {"batch": BATCH, "expect": "7"},
        ("release", BATCH),
        f"{BATCH} runs again from its next tick; at most 7 records may be deleted",
        lambda: holds() == [],
        a_guard_hold,
    ),
    Case(
        "run",
        {"batch": BATCH},
        ("send", "run 1"),
        f"{BATCH} is queued as run 1",
        lambda: [run.state for run in JobRun.select()] == ["enqueued"],
    ),
    Case(
        "cancel",
        {"run": "1"},
        ("cancel", "run:1"),
        f"run 1 of {BATCH} waited, and will not run",
        lambda: (JobRun.get().state, JobRun.get().cancelled_by) == ("skipped", "anna"),
        waiting_run,
    ),
    Case("flag", {"name": FLAG, "to": "on"}, ("flags on", FLAG), f"{FLAG} is on", lambda: FeatureFlag.is_on(FLAG)),
    Case(
        "retry",
        {"id": "1"},
        ("quarantine retry", "1"),
        "1 will be retried",
        lambda: Quarantined.get_by_id(1).retry_at <= now(),
        bad,
    ),
    Case(
        "retry",
        {"all": "on", "batch": BATCH},
        ("quarantine retry", "all"),
        "2 will be retried",
        lambda: {row.retry_at <= now() for row in Quarantined.select().where(Quarantined.batch == BATCH)} == {True},
        bad,
        (("count", "2"),),
    ),
    Case(
        "discard",
        {"id": ["1", "2"]},
        ("quarantine discard", "2"),
        "2 discarded",
        lambda: [row.key for row in Quarantined.select()] == ["clean_project_refs:7"],
        bad,
    ),
    Case(
        "discard",
        {"all": "on", "batch": BATCH, "kind": "record", "count": "2"},
        ("quarantine discard", "all"),
        "2 discarded",
        lambda: [row.key for row in Quarantined.select()] == ["clean_project_refs:7"],
        bad,
    ),
    Case(
        "break",
        {"lease": LEASE},
        ("leases break", LEASE),
        f"{LEASE} is free",
        lambda: not client.exists(f"{locks.LEASE_KEY_PREFIX}{LEASE}"),
        lease,
        (("holder", "forge-2:77 holds it since 2026-09-21 14:13:20"),),
    ),
]
every_case = every("case", CASES)


def afresh(case):
    empty()
    client.flushdb()
    case.arrange()


def acts():
    return list(Act.select(Act.act, Act.what, Act.actor, Act.reason).order_by(Act.id).tuples())


def wrong(answer):
    """The sentence of a form that was refused."""
    (sentence,) = re.findall(r'role="alert"><strong>Not done, or only in part:</strong> (.*?)</p>', answer.text)
    return html.unescape(sentence)


def command(*words, **settings):
    """What a command says as JSON."""
    environment = os.environ | {f"FORGEKEEPER_{name}": value for name, value in settings.items()}
    return json.loads(run(["-m", "forgekeeper.cli", *words, "--json"], env=environment).stdout)


@whole_only
def test_everything_can_be_stopped_from_every_page_by_who_may(anna, vera):
    assert ["STOP ALL" in each.get("/settings").text for each in (anna, vera)] == [True, False]


def test_the_page_to_which_an_act_leads_shows_what_it_has_done(anna):
    page = f"/batches/{BATCH}?act=shown"
    before = anna.get(page).text

    anna.act("pause", batch=BATCH)

    assert [REASON in text for text in (before, anna.get(page).text)] == [False, True]


# Each act


def test_every_act_is_tried():
    assert {case.name for case in CASES} == {*CONSOLE_ACTIONS}


@whole_only
@every_case
def test_it_is_done_by_the_person_with_the_reason_and_the_next_page_says_so(anna, case):
    afresh(case)

    answer = anna.act(case.name, back="/flags?x=1", **case.fields, **dict(case.seen))

    assert (answer.status, answer.headers.get("location")) == (303, "/flags?x=1"), wrong(answer)
    assert (case.then(), acts()[-1]) == (True, (*case.audit, "anna", REASON))
    assert anna.said(answer).startswith(case.says)


@every_case
def test_its_form_says_what_it_finds_and_sends_what_it_was_asked_for(anna, case):
    afresh(case)

    answer = anna.get(f"/act/{case.name}?{urlencode(case.fields, doseq=True)}")

    sent = re.findall(r'type="hidden" name="(\w+)" value="(.*?)"', answer.text)
    asked = [(name, one) for name, of in case.fields.items() for one in ([of] if isinstance(of, str) else of)]
    assert answer.status == 200
    assert sent == [
        *(one for one in asked if one[0] in CONSOLE_ACTIONS[case.name].object_fields),
        *case.seen,
        ("back", "/"),
    ]
    assert "<li>" in answer.text
    assert "The effect is not known now" not in answer.text


@every_case
def test_without_a_reason_nothing_changes(anna, case):
    afresh(case)

    answer = anna.act(case.name, **case.fields | {"reason": " "})

    assert (answer.status, wrong(answer)) == (422, "give a reason: the audit keeps it.")
    assert (acts(), case.then()) == ([], False)


@every_case
def test_a_viewer_cannot_by_a_hand_made_request_either(vera, case):
    afresh(case)

    form = vera.get(f"/act/{case.name}?{urlencode(case.fields, doseq=True)}")
    answer = vera.act(case.name, **case.fields)

    assert (form.status, answer.status, '<form method="post" action="/act' in form.text) == (403, 403, False)
    assert (acts(), case.then()) == ([], False)


def test_where_the_settings_let_nobody_act_no_operator_can(console, users):
    anna = Operated(console(console_users=users), "anna")

    assert (anna.act("stop", batch="*").status, holds()) == (403, [])


# What is asked for is not there, or is not done


@every(
    "name, fields, status",
    [
        ("prune", {}, 404),
        ("pause", {"batch": "nothing"}, 404),
        ("pause", {}, 404),
        ("run", {"batch": "*"}, 404),
        ("flag", {"name": "nothing", "to": "on"}, 404),
        ("flag", {"name": FLAG, "to": "maybe"}, 404),
        ("retry", {"batch": BATCH}, 404),
        ("retry", {"all": "on", "kind": "nothing"}, 404),
        ("cancel", {"run": "x" * 9}, 404),
        ("cancel", {"run": "9" * 900}, 404),
        ("pause", {"batch": BATCH, "until": "soon"}, 422),
        ("pause", {"batch": BATCH, "until": "2001-01-01"}, 422),
        ("pause", {"batch": BATCH, "everything": "1"}, 422),
        ("pause", {"batch": BATCH, "reason": "x" * (MAX_TEXT_LENGTH + 1)}, 422),
        ("release", {"batch": BATCH, "expect": "-1"}, 422),
        ("release", {"batch": BATCH}, 422),
        ("release", {"batch": BATCH, "expect": "0"}, 303),
        ("release", {"batch": "*", "expect": "7"}, 404),
        ("retry", {"all": "on"}, 422),
        ("cancel", {"run": "4711"}, 409),
        ("retry", {"id": "4711"}, 409),
        ("break", {"lease": "nothing"}, 409),
    ],
)
def test_what_makes_no_sense_changes_nothing(anna, name, fields, status):
    answer = anna.act(name, **fields)

    assert (answer.status, acts(), holds()) == (status, [], [])


@every(
    "path", ["cancel?run=4711", "retry?id=4711", "pause?batch=nothing", "flag?name=nothing&to=on", "prune", "pause?"]
)
def test_of_what_there_is_not_there_is_no_form(anna, path):
    answer = anna.get(f"/act/{path}")

    assert (answer.status, "<button type" in answer.text.partition("<main")[2]) == (404, False)


def test_a_form_that_was_refused_keeps_what_was_typed(anna):
    answer = anna.act("pause", batch=BATCH, until="soon", reason='a "quoted" reason', back="/flags")

    assert re.findall(r'name="(\w+)"[^>]* value="(.*?)"', answer.text)[-4:] == [
        ("batch", BATCH),
        ("back", "/flags"),
        ("reason", "a &#34;quoted&#34; reason"),
        ("until", "soon"),
    ]


def test_a_batch_that_is_held_back_is_not_sent_and_the_sentence_says_why(anna):
    Hold.add(BATCH, "pause", reason="no", by="ops:1")

    answer = anna.act("run", batch=BATCH)

    assert (answer.status, JobRun.select().count()) == (409, 0)
    assert wrong(answer).startswith(f"{BATCH} has been paused by ops:1 since ")


def test_all_are_discarded_only_where_their_number_is_repeated(anna):
    bad()

    answer = anna.act("discard", all="on", count="2")

    assert (answer.status, Quarantined.select().count()) == (409, 3)
    assert wrong(answer) == "there are 3 entries now, not 2: nothing was changed; check them again."


def test_of_several_that_are_tried_again_one_that_is_gone_stops_no_other(anna):
    bad()

    answer = anna.act("retry", id=["1", "4711", "2"])

    assert (answer.status, wrong(answer).partition(";")[0]) == (409, "2 will be retried")
    assert [what for _, what, _, _ in acts()] == ["1", "2"]


@every("back", ["//evil.example", "https://evil.example/", "javascript:alert(1)", "/\\evil.example", "/\t/evil", ""])
def test_an_act_leads_to_no_other_host(anna, back):
    assert anna.act("flag", name=FLAG, to="on", back=back).headers["location"] == "/"


def test_a_form_leads_back_to_the_page_of_ours_that_one_comes_from(anna, acting):
    ours = anna.get(f"/act/pause?batch={BATCH}", Referer=f"{acting.url}/batches/{BATCH}?state=failed")
    theirs = anna.get(f"/act/pause?batch={BATCH}", Referer="https://evil.example/page")

    assert f'name="back" value="/batches/{BATCH}?state=failed"' in ours.text
    assert 'name="back" value="/"' in theirs.text


# What a form finds


def test_the_form_of_a_run_has_the_preview_s_numbers(anna):
    sample.add_statuses(5)

    text = anna.get(f"/act/run?batch={BATCH}").text

    assert f"<li>user_status of {BATCH}: 2 would be deleted</li>" in text
    assert f">Send {BATCH} to the workers</button>" in text


def test_the_form_of_a_stop_names_what_is_at_work(anna):
    JobRun.start_here(BATCH, by="forge-1:7")
    work = [{"what": "clean_project_refs", "message_id": "m", "run": 12, "seconds": 90.0}]
    row = {"kind": "worker", "host": "forge-2", "pid": 8, "version": "0.9", "started_at": now(), "alive_at": now()}
    Process.create(**row, silent_from="2099-01-01", at_work=work)

    every_one, of_batch = (anna.get(f"/act/stop?batch={batch}").text for batch in ("*", BATCH))

    run, child = f"run 1 of {BATCH} has been running on forge-1:7", "a child of run 12, has been running on forge-2:8"
    assert [run in every_one, child in every_one, run in of_batch, child in of_batch] == [True, True, True, False]


def test_a_script_in_a_reason_comes_back_escaped(anna):
    again = anna.act("pause", batch=BATCH, until=SCRIPT, reason=SCRIPT)
    done = anna.act("pause", batch=BATCH, reason=SCRIPT)
    form = anna.get(f"/act/resume?batch={BATCH}")

    assert (done.status, [SCRIPT in page.text for page in (again, form)]) == (303, [False, False])
    assert html.escape(SCRIPT) in form.text
    assert SCRIPT not in anna.said(done)


@every(
    "path", ["/act/break?lease=", "/act/pause?batch=", "/act/cancel?run=", "/act/retry?id=", "/act/flag?to=on&name="]
)
def test_a_script_in_an_address_comes_back_escaped(anna, path):
    assert SCRIPT not in anna.get(path + urlencode({"": SCRIPT})[1:]).text


# Servers that are away, and others who act


def test_a_pause_is_what_status_and_audit_say(anna):
    anna.act("pause", batch=BATCH, until="2h")

    row = command("status")["batches"][BATCH]
    assert (row["paused"]["by"], row["paused"]["reason"]) == ("anna", REASON)


@whole_only
@every("fields", [{"batch": "*"}, {"batch": BATCH}])
def test_a_stop_works_while_redis_is_away(shared, users, fields):
    empty()
    anna = Operated(shared(console_users=users, console_actions="on", redis_url="redis://127.0.0.1:1/0"), "anna")

    assert anna.get(f"/act/stop?{urlencode(fields)}").status == 200
    assert anna.act("stop", **fields).status == 303
    assert {(kind, by) for _, kind, by, _ in holds()} == {("stop", "anna")}


def test_what_needs_redis_says_that_it_is_away(shared, users):
    anna = Operated(shared(console_users=users, console_actions="on", redis_url="redis://127.0.0.1:1/0"), "anna")

    answer = anna.act("run", batch=BATCH)

    assert (answer.status, wrong(answer).startswith("cannot use Redis: ")) == (503, True)
    assert (acts(), JobRun.select().count()) == ([], 0)


@pytest.fixture
def lacking(database):
    """Let a migration be pending."""
    database.execute_sql("update forgekeeper_migrations set name = 'x' where name = '0003_paused_since'")
    yield
    database.execute_sql("update forgekeeper_migrations set name = '0003_paused_since' where name = 'x'")


def test_a_stop_works_while_a_migration_is_pending_and_a_pause_does_not(anna, lacking):
    paused, stopped = (anna.act(kind, batch=BATCH) for kind in ("pause", "stop"))

    assert (paused.status, wrong(paused)) == (409, "the database lacks 1 migration(s): run `forgekeeper migrate`.")
    assert (stopped.status, holds()) == (303, [(BATCH, "stop", "anna", REASON)])


def test_two_operators_at_once_hold_a_batch_back_beside_one_another(anna, acting):
    otto = Operated(acting, "otto")

    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda one: one.act("pause", batch=BATCH), [anna, otto])]

    assert [answer.status for answer in answers] == [303, 303]
    assert {by for _, _, by, _ in holds()} == {"anna", "otto"}
