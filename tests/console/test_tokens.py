"""The tokens of the API: what they open, what they never do, and the commands that make them."""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from forgekeeper.cli.console import command
from forgekeeper.cli.console.access import MAX_FAILED_LOGINS
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.reading import BUSY_SENTENCE, MAX_QUESTIONS
from forgekeeper.cli.console.tokens import TOKEN_FORMAT, ApiToken, create_token, find_token, hash_token
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.cli.terminal import Problem
from forgekeeper.ledger.holds import Hold
from forgekeeper.platform.settings import PREFIX
from tests.harness.every import every
from tests.harness.waiting import wait_until

PASSWORD, LOOPBACK, LIMIT = "correct horse", "127.0.0.1", 60.0
SECRETS = {name: create_token() for name in ("prometheus", "removed", "expired", "lasting")}
CREATED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def ended(seconds):
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)


def write_tokens(path):
    made, ends = LineFile(path, TOKEN_FORMAT), {"expired": ended(-1), "lasting": ended(3600)}
    with made.edit_lines() as known:
        for name, secret in SECRETS.items():
            known[name] = ApiToken(name, CREATED, ends.get(name), hash_token(secret))
    return made


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "tokens")


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    made = LineFile(tmp_path_factory.mktemp("users") / "users", USER_FORMAT)
    with made.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password(PASSWORD))
    return made


@pytest.fixture
def guarded(shared, users, tokens):
    """The console whose users log in and may act; few tests let a token fail there."""
    return shared(console_users=users.path, console_actions="on", console_tokens=tokens.path)


@pytest.fixture
def guessed(console, users, tokens):
    """A console of its own, where tokens and logins may fail."""
    return console(console_users=users.path, console_tokens=tokens.path)


def bearer(name):
    return {"Authorization": f"Bearer {SECRETS.get(name, name)}"}


def send(console, method, path, **headers):
    return console.ask(urllib.request.Request(console.url + path, data=b"", headers=headers, method=method))


# Reading


def test_nobody_reads_the_api_without_a_token_if_there_are_users(guarded):
    answer = guarded.get("/api/v1/status")

    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(answer.text)["detail"].startswith("the API needs a token: `forgekeeper console token add NAME`")


@every("name", ["prometheus", "lasting"])
def test_a_token_reads_without_a_session(guarded, name):
    answer = guarded.get("/api/v1/holds", **bearer(name))

    assert (answer.status, json.loads(answer.text)["holds"]) == (200, [])
    assert answer.headers["set-cookie"] is None


def test_a_person_with_a_session_reads_the_api_too(guarded):
    assert guarded.get("/api/v1/holds", Cookie=guarded.log_in("anna", PASSWORD)).status == 200


def test_a_token_that_is_removed_reads_nothing_more(guarded, tokens):
    before = guarded.get("/api/v1/holds", **bearer("removed")).status

    with tokens.edit_lines() as known:
        del known["removed"]

    assert (before, guarded.get("/api/v1/holds", **bearer("removed")).status) == (200, 401)


def test_a_token_that_has_expired_reads_nothing(guarded):
    answer = guarded.get("/api/v1/holds", **bearer("expired"))

    assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
    assert json.loads(answer.text)["detail"].startswith("the token is expired: ")


def test_a_page_of_another_site_reads_nothing_with_the_api(guarded):
    answer = guarded.get("/api/v1/holds", Origin="https://evil.example", **bearer("prometheus"))

    assert [name for name in answer.headers if name.lower().startswith("access-control")] == []
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_nobody_reads_while_the_file_of_tokens_cannot_be_used(console, users, tmp_path):
    tokens = write_tokens(tmp_path / "tokens")
    one = console(console_users=users.path, console_tokens=tokens.path)

    tokens.path.write_text(f"prometheus:{SECRETS['prometheus']}\n")
    answer = one.get("/api/v1/holds", **bearer("prometheus"))

    assert answer.status == 503
    assert wait_until(lambda: one.said("token file unreadable"), LIMIT)
    assert SECRETS["prometheus"] not in one.text() + answer.text


def test_more_questions_than_the_console_can_ask_at_a_time_are_refused(guarded, other):
    other.execute("lock table job_runs")
    with ThreadPoolExecutor(MAX_QUESTIONS + 6) as crowd:
        paths = [f"/api/v1/runs?limit={number}" for number in range(1, MAX_QUESTIONS + 7)]
        answers = [crowd.submit(guarded.get, path, **bearer("prometheus")) for path in paths]
        assert wait_until(lambda: sum(one.done() for one in answers) >= 6, LIMIT)
        other.connection.rollback()

        refused = [one.result() for one in answers if BUSY_SENTENCE in one.result().text]

    assert {(one.status, one.headers["retry-after"]) for one in refused} == {(503, "1")}


def test_head_answers_as_get_without_the_answer(guarded):
    answer = guarded.ask(
        urllib.request.Request(f"{guarded.url}/api/v1/holds", headers=bearer("prometheus"), method="HEAD")
    )

    assert (answer.status, answer.headers["content-type"], answer.text) == (200, "application/json", "")


# A token cannot act


@every("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_every_method_but_get_is_refused(guarded, method):
    answers = [
        send(guarded, method, f"/api/v1{path}", **bearer("prometheus"), Origin=guarded.url)
        for path in ("/status", "/openapi.json", "/nothing", "/batches/prune")
    ]

    assert {(one.status, one.headers["allow"]) for one in answers} == {(405, "GET, HEAD")}


@every("path", ["/", "/audit", "/act/stop?batch=prune", "/metricsx", "/api%2f..%2fsettings"])
def test_a_token_opens_no_page(guarded, path):
    assert guarded.get(path, **bearer("prometheus")).status in {303, 404}


def test_a_token_cannot_act(guarded):
    fields = {"batch": "prune", "reason": "a token did it"}

    answers = [guarded.post(path, fields, **bearer("prometheus")) for path in ("/act/stop", "/api/act/stop")]

    assert [(one.status, one.headers["location"]) for one in answers] == [(303, "/login?next=%2F"), (405, None)]
    assert Hold.find_state("prune") is None


# Guessing

WRONG = [
    create_token(),
    SECRETS["prometheus"][:-1],
    SECRETS["prometheus"].upper(),
    hash_token(SECRETS["prometheus"]),
    "",
    "prometheus",
    f"{SECRETS['prometheus']} {SECRETS['prometheus']}",
]


@every("wrong", WRONG)
def test_only_the_whole_token_is_one(tokens, wrong):
    assert find_token(tokens.read_lines().values(), wrong) is None


@every("name", ["prometheus", "lasting", "expired"])
def test_a_token_is_found_by_its_hash(tokens, name):
    assert find_token(tokens.read_lines().values(), SECRETS[name]).name == name


def test_wrong_tokens_count_to_the_limit_of_logins(guessed):
    statuses = [guessed.get("/api/v1/holds", **bearer(create_token())).status for _ in range(MAX_FAILED_LOGINS + 1)]

    login = guessed.post("/login", {"name": "anna", "password": PASSWORD})

    assert (statuses, login.status) == ([401] * MAX_FAILED_LOGINS + [429], 429)


def test_wrong_tokens_of_others_do_not_refuse_a_valid_token(guessed):
    for _ in range(MAX_FAILED_LOGINS + 1):
        guessed.get("/api/v1/holds", **bearer(create_token()))

    assert guessed.get("/api/v1/holds", **bearer("prometheus")).status == 200


def test_the_log_has_the_use_of_a_token_once_and_never_the_token(guessed):
    for _ in range(3):
        guessed.get("/api/v1/holds", **bearer("prometheus"))
    guessed.get("/api/v1/holds", **bearer("expired"))
    assert wait_until(lambda: guessed.said("console token refused"), LIMIT)

    used = [line for line in guessed.lines() if line["message"] == "console token used"]

    assert [(line["name"], line["client"]) for line in used] == [("prometheus", LOOPBACK)]
    assert [name for name, secret in SECRETS.items() if secret in guessed.text()] == []


# Without users, and behind a proxy


def test_without_users_and_proxies_anybody_on_the_machine_reads(shared):
    assert shared().get("/api/v1/holds").status == 200


def test_without_users_a_page_of_another_host_reads_nothing(shared):
    answer = shared().get("/api/v1/holds", Host="evil.example")

    assert (answer.status, answer.headers["content-type"]) == (421, "application/problem+json")


def test_without_users_a_wrong_token_reads_nothing_either(shared):
    assert shared().get("/api/v1/holds", **bearer(create_token())).status == 401


def test_behind_a_proxy_a_token_reads_and_needs_no_user(shared, tokens):
    behind = shared(console_proxy=LOOPBACK, console_tokens=tokens.path)

    answers = [behind.get("/api/v1/holds", **headers) for headers in (bearer("prometheus"), {})]

    assert [one.status for one in answers] == [200, 403]


def test_behind_a_proxy_a_token_does_not_open_another_address(shared, tokens):
    elsewhere = shared(console_proxy="192.0.2.1", console_tokens=tokens.path)

    assert elsewhere.get("/api/v1/holds", **bearer("prometheus")).status == 403


def test_a_bearer_token_of_the_proxy_itself_is_none_of_ours(shared, tokens):
    behind = shared(console_proxy=LOOPBACK, console_tokens=tokens.path)

    headers = {"X-Forwarded-User": "vera", "Authorization": "Bearer a.jwt.of-the-proxy"}

    assert behind.get("/api/v1/holds", **headers).status == 200


# The file, and the commands


@pytest.fixture
def token(tmp_path, monkeypatch):
    """Run `forgekeeper console token <arguments>`; return what it says, or the `Problem` that it ends with."""

    def call(*arguments):
        done = CliRunner().invoke(command.console, ["token", *arguments])
        return done.exception or done.stdout

    monkeypatch.setenv(PREFIX + "CONSOLE_TOKENS", str(tmp_path / "tokens"))
    return call


def test_a_token_is_shown_once_and_only_its_hash_is_kept(token, tmp_path):
    shown = re.match(r"forgekeeper_read_[0-9a-f]{64}(?=\n)", token("add", "prometheus"))[0]

    file = tmp_path / "tokens"
    assert shown.removeprefix("forgekeeper_read_") not in file.read_text() + token("list") + token("list", "--json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_token(LineFile(file, TOKEN_FORMAT).read_lines().values(), shown).name == "prometheus"


def test_a_token_may_expire(token):
    before = ended(0)

    added = json.loads(token("add", "prometheus", "--days", "30", "--json"))

    (listed,) = json.loads(token("list", "--json"))
    expires = datetime.fromisoformat(added["expires_at"])
    assert before + timedelta(days=30) <= expires <= ended(0) + timedelta(days=30)
    assert listed == {name: added[name] for name in ("name", "created_at", "expires_at")} | {"expired": False}


def test_a_name_has_one_token(token, tmp_path):
    token("add", "prometheus")
    kept = (tmp_path / "tokens").read_text()

    refused = token("add", "prometheus")

    assert str(refused) == "there is a token 'prometheus' already: remove it, or choose another name"
    assert (tmp_path / "tokens").read_text() == kept


def test_a_removed_token_is_not_in_the_file(token, tmp_path):
    token("add", "prometheus")

    assert token("remove", "prometheus") == "removed prometheus\n"
    assert (tmp_path / "tokens").read_text() == ""
    assert (
        str(token("remove", "prometheus"))
        == f"there is no token 'prometheus' in {tmp_path / 'tokens'}; there are: none"
    )


def test_a_token_without_a_valid_name_is_refused(token, tmp_path):
    assert str(token("add", "a:b")).startswith("a name has 1 to 100 printable characters")
    assert not (tmp_path / "tokens").exists()


def test_without_the_setting_the_commands_name_it(token, monkeypatch):
    monkeypatch.setenv(PREFIX + "CONSOLE_TOKENS", "")

    assert str(token("list")).startswith(f"{PREFIX}CONSOLE_TOKENS is not set: ")


MALFORMED = [
    "prometheus",
    f"prometheus:20260102T030405Z:-:{'0' * 64}",
    f"prometheus:20260102T030405Z:-:sha256${'0' * 63}",
    f"prometheus:20260102T030405Z:soon:sha256${'0' * 64}",
    f"prometheus:20261302T030405Z:-:sha256${'0' * 64}",
    f"prometheus:-:-:sha256${'0' * 64}",
    f" :20260102T030405Z:-:sha256${'0' * 64}",
]


@every("line", MALFORMED)
def test_a_malformed_line_is_named_by_its_number(tmp_path, line):
    file = tmp_path / "tokens"
    file.write_text(f"good:20260102T030405Z:-:sha256${'0' * 64}\n{line}\n")

    with pytest.raises(Problem, match=r"line 2 of .* is not a token, or repeats a token: write name:created:expires"):
        LineFile(file, TOKEN_FORMAT).read_lines()


def test_a_line_keeps_its_times(tmp_path):
    tokens = write_tokens(tmp_path / "tokens")

    found = tokens.read_lines()["lasting"]

    assert (found.created_at, timedelta(0) < found.expires_at - datetime.now(UTC) <= timedelta(hours=1)) == (
        CREATED,
        True,
    )
