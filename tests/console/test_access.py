"""Who is let in, and what is refused: asked of a real console over HTTP."""

import base64
import http.client
import json
import re
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.acts import Act
from forgekeeper.cli.console.access import MAX_FAILED_LOGINS, MAX_FORM_BYTES, RESPONSE_HEADERS
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.pages import DECLARED_PAGES, load_pages
from forgekeeper.cli.console.problem_details import API_ROOT
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.cli.console.web_api.endpoints import DECLARED_ENDPOINTS, load_endpoints
from forgekeeper.ledger.heartbeats import read_version
from forgekeeper.ledger.holds import Hold
from forgekeeper.platform.connections import client
from forgekeeper.platform.installation import Installation, claim_by_writing
from tests.harness.every import every
from tests.harness.programs import eventually
from tests.harness.thorough import whole_only
from tests.system.soak import rights

ROOT = Path(__file__).parents[2]
PASSWORD = "correct horse"
HASH = hash_password(PASSWORD)
LOOPBACK = "127.0.0.1"
HEADER = "X-Forwarded-User"


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """The file of users: operators and a viewer of one password, and an operator whom a proxy names."""
    made = LineFile(tmp_path_factory.mktemp("users") / "users", USER_FORMAT)
    with made.edit_lines() as known:
        for name, role in {"vera": "viewer", "petra": "operator"}.items():
            known[name] = User(name, role, "-" if name == "petra" else HASH)
        known |= {name: User(name, "operator", HASH) for name in ("anna", "removed", "renewed", "lowered")}
    return made


@pytest.fixture
def guarded(shared, users):
    """The console whose users log in, and may act; no test lets a login fail there."""
    return shared(console_users=users.path, console_actions="on")


@pytest.fixture
def looking(shared, users):
    """One whose users log in, and may only look."""
    return shared(console_users=users.path)


SESSIONS = {}


def session(console, name):
    """The cookie of a session of that user's, of one login for all tests."""
    key = (console.url, name)
    if key not in SESSIONS:
        SESSIONS[key] = console.log_in(name, PASSWORD)
    return SESSIONS[key]


def shown_person(answer):
    """Who the page says looks, and in which role."""
    name, role = re.search(r'class="person">\s*<span>([^<]*)</span> <span class="role">\((\w+)\)', answer.text).groups()
    return name, role


def raw(console, request):
    """Send bytes; return all that is answered."""
    port = int(console.settings["FORGEKEEPER_CONSOLE_PORT"])
    with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


# Nobody asks who it is


def test_without_users_and_proxies_anybody_here_may_look_and_not_act(shared):
    answer = shared().get("/")

    assert (answer.status, shown_person(answer)) == (200, ("anybody", "viewer"))


@every(
    "host", ["evil.example", "evil.example:9190", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "a]:1"]
)
def test_a_page_of_another_host_whose_name_has_come_to_lead_here_sees_nothing(shared, host):
    answer = shared().get("/", Host=host)

    assert answer.status in {400, 421}
    assert "user_status_cleanup</a></th>" not in answer.text


@every("host", ["localhost", "localhost:1234", "127.0.0.1:80", "[::1]", "[::1]:9190"])
def test_every_name_of_this_machine_leads_to_it(shared, host):
    assert shared().get("/", Host=host).status == 200


def test_probes_need_no_login_and_ask_no_server(guarded):
    answers = [guarded.get(path, Host="10.0.0.7") for path in ("/livez", "/readyz", "/metrics")]

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert "process_resident_memory_bytes" in answers[-1].text
    assert guarded.get("/livez/more").status != 200


# Logging in


@every("path", ["/", "/batches/prune", "/nothing", "/act/pause?batch=prune", "/settings"])
def test_nobody_sees_a_page_without_a_login(guarded, path):
    answer = guarded.get(path)

    assert (answer.status, answer.text) == (303, "")
    assert answer.headers["location"].startswith("/login?next=%2F")


@every("host", ["localhost/static/", "localhost/static/x?", "localhost/login?", "localhost/login#", "a/static/@b"])
@every("path", ["/settings", "/flags", "/nothing"])
def test_no_name_of_the_host_makes_a_page_one_that_anybody_may_see(guarded, host, path):
    said = raw(guarded, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())

    assert said.startswith(("HTTP/1.1 303 ", "HTTP/1.1 400 "))


def test_nobody_acts_without_a_login(guarded):
    answer = guarded.post("/act/pause", {"batch": "prune"})

    assert (answer.status, answer.headers["location"]) == (303, "/login?next=%2F")


def test_a_page_that_renews_itself_is_left_for_the_login(guarded):
    answer = guarded.get("/", **{"HX-Request": "true"})

    assert (answer.status, answer.headers["hx-redirect"]) == (401, "/login?next=%2F")


def test_whoever_logs_in_comes_to_the_page_that_was_asked_for(guarded):
    form = guarded.get(guarded.get("/audit?who=anna&what=a%20b").headers["location"])
    (to,) = re.findall(r'name="next" value="([^"]*)"', form.text)

    answer = guarded.post("/login", {"name": "anna", "password": PASSWORD, "next": to.replace("&amp;", "&")})

    assert (answer.status, answer.headers["location"]) == (303, "/audit?who=anna&what=a+b")


def test_the_page_names_who_has_logged_in_with_role_and_a_way_out(guarded):
    answer = guarded.get("/", Cookie=session(guarded, "vera"))

    assert (answer.status, shown_person(answer)) == (200, ("vera", "viewer"))
    assert '<form method="post" action="/logout">' in answer.text


@whole_only
def test_an_operator_is_a_viewer_where_nobody_may_act(looking):
    assert shown_person(looking.get("/", Cookie=session(looking, "anna"))) == ("anna", "viewer")


EVIL = ["//evil.example", "https://evil.example/", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)", "evil"]


@whole_only
@every("to", [*EVIL, "/\t/evil.example", "/\n/evil.example", " //evil.example", "/a\r\nSet-Cookie: a=b"])
def test_a_login_leads_to_no_other_host(guarded, to):
    answer = guarded.post("/login", {"name": "anna", "password": PASSWORD, "next": to})

    assert (answer.status, answer.headers["location"]) == (303, "/")


def test_the_form_of_a_login_repeats_no_address_of_another_host(guarded):
    assert "evil.example" not in guarded.get("/login?next=//evil.example").text


# Sessions


def test_a_script_cannot_read_the_session_and_another_site_cannot_send_it(guarded):
    cookie = guarded.post("/login", {"name": "anna", "password": PASSWORD}).headers["set-cookie"].lower()

    assert ("httponly" in cookie, "samesite=lax" in cookie, "max-age=43200" in cookie) == (True, True, True)


def test_behind_a_proxy_with_tls_the_session_never_goes_without(guarded):
    fields = {"name": "anna", "password": PASSWORD}

    answer = guarded.post(
        "/login", fields, sec_fetch_site=None, origin="https://console.example", host="console.example"
    )

    assert "secure" in answer.headers["set-cookie"].lower()


def test_each_login_begins_a_new_session_whatever_the_browser_had_before(guarded):
    planted = session(guarded, "vera")

    answer = guarded.post("/login", {"name": "anna", "password": PASSWORD}, cookie=planted)
    fresh = answer.headers["set-cookie"].partition(";")[0]

    again = guarded.log_in("anna", PASSWORD)

    # Without the time and the signature, which would differ anyway.
    assert len({one.rsplit(".", 2)[0] for one in (planted, fresh, again)}) == 3
    assert shown_person(guarded.get("/", Cookie=planted)) == ("vera", "viewer")


def test_a_session_that_was_ended_is_of_no_use_to_who_has_kept_it(guarded):
    cookie = guarded.log_in("anna", PASSWORD)

    answer = guarded.post("/logout", cookie=cookie)

    assert (answer.status, answer.headers["location"]) == (303, "/login")
    assert guarded.get("/", Cookie=cookie).status == 303


def test_a_session_ends_with_its_user(guarded, users):
    cookie = guarded.log_in("removed", PASSWORD)

    with users.edit_lines() as known:
        del known["removed"]

    assert guarded.get("/", Cookie=cookie).status == 303


def test_a_session_ends_when_its_users_password_changes(guarded, users):
    cookie = guarded.log_in("renewed", PASSWORD)

    with users.edit_lines() as known:
        known["renewed"] = known["renewed"]._replace(hash=hash_password(PASSWORD))

    assert guarded.get("/", Cookie=cookie).status == 303


def test_a_user_who_becomes_a_viewer_is_one_at_once(guarded, users):
    cookie = guarded.log_in("lowered", PASSWORD)

    with users.edit_lines() as known:
        known["lowered"] = known["lowered"]._replace(role="viewer")

    assert shown_person(guarded.get("/", Cookie=cookie)) == ("lowered", "viewer")


def tampered(cookie):
    """The session as somebody would like to have it, each with the signature that there is."""
    name, _, value = cookie.partition("=")
    payload, stamp, signature = value.rsplit(".", 2)
    renamed = (
        base64.urlsafe_b64encode(json.dumps({"name": "anna", "of": "", "once": ""}).encode()).rstrip(b"=").decode()
    )
    values = (
        f"{renamed}.{stamp}.{signature}",
        f"{payload}.zzzzzz.{signature}",
        f"{payload}.{stamp}.",
        payload,
        "",
        "a.b.c",
    )
    return [f"{name}={one}" for one in values]


def test_a_session_that_somebody_has_changed_is_none(guarded):
    cookie = session(guarded, "vera")

    assert {guarded.get("/", Cookie=one).status for one in tampered(cookie)} == {303}


def test_what_was_signed_for_another_purpose_is_no_session(guarded):
    cookie = session(guarded, "vera")

    answer = guarded.get("/login", Cookie=cookie.replace("forgekeeper_session", "forgekeeper_said"))

    assert "vera" not in answer.text


def test_a_console_that_was_started_again_knows_no_session_of_before(guarded, looking):
    assert looking.get("/", Cookie=session(guarded, "anna")).status == 303


def test_nobody_is_let_in_while_the_file_of_users_cannot_be_used(guarded, users):
    cookie, kept = session(guarded, "anna"), users.path.read_text()

    users.path.write_text("anna:operator:swordfish\n")
    answers = [guarded.get("/", Cookie=cookie), guarded.post("/login", {"name": "anna", "password": "swordfish"})]
    users.path.write_text(kept)

    assert [one.status for one in answers] == [503, 503]
    eventually(lambda: guarded.said("user file unreadable"))
    assert "swordfish" not in guarded.text() + "".join(one.text for one in answers)


# Guessing

WRONG = [("anna", "wrong"), ("nobody", PASSWORD), ("petra", PASSWORD), ("petra", "-"), ("anna", HASH)]


def test_an_address_may_guess_a_few_times_a_minute_and_then_waits_also_with_the_right_password(console, users):
    one = console(console_users=users.path)
    wrong = [one.post("/login", {"name": name, "password": password}) for name, password in WRONG]

    assert [(answer.status, answer.headers["set-cookie"]) for answer in wrong] == [(401, None)] * MAX_FAILED_LOGINS
    assert {"Name or password is wrong." in answer.text for answer in wrong} == {True}
    right = one.post("/login", {"name": "anna", "password": PASSWORD})
    assert (right.status, right.headers["set-cookie"]) == (429, None)
    assert 0 < int(right.headers["retry-after"]) <= 60
    assert f"try again in {right.headers['retry-after']} seconds" in right.text


def guess(console, name="anna", **headers):
    return console.post("/login", {"name": name, "password": "wrong"}, **headers).status


@whole_only
def test_behind_a_proxy_a_stranger_s_guesses_lock_out_nobody_at_another_address(console, users):
    one = console(console_users=users.path, console_proxy=LOOPBACK)
    guesses = [guess(one, "nobody", x_forwarded_for="203.0.113.7, 192.0.2.9") for _ in range(MAX_FAILED_LOGINS + 1)]

    answer = one.post("/login", {"name": "anna", "password": PASSWORD}, x_forwarded_for="192.0.2.9, 203.0.113.7")

    assert (guesses[-1], answer.status) == (429, 303)


def test_a_browser_in_which_a_person_has_logged_in_is_not_locked_out_by_strangers(console, users):
    one = console(console_users=users.path)
    before = one.post("/login", {"name": "anna", "password": PASSWORD})
    (known,) = (cookie.partition(";")[0] for cookie in before.headers.get_all("set-cookie") if "_known=" in cookie)
    guesses = [guess(one) for _ in range(MAX_FAILED_LOGINS + 1)]

    again = one.post("/login", {"name": "anna", "password": PASSWORD}, cookie=known)
    as_another = guess(one, "vera", cookie=known)
    its_own = [guess(one, cookie=known) for _ in range(MAX_FAILED_LOGINS + 1)]

    assert (guesses[-1], again.status, as_another, its_own[-1]) == (429, 303, 429, 429)


@whole_only
def test_the_log_says_who_has_logged_in_and_no_password_and_no_name_that_nobody_has(console, users):
    one = console(console_users=users.path)
    assert {
        one.post("/login", {"name": "anna", "password": PASSWORD}).status for _ in range(MAX_FAILED_LOGINS + 1)
    } == {303}
    one.post("/login", {"name": "swordfish", "password": "hunter2hunter2"})

    eventually(lambda: one.said("console login failed"))
    login, (failed,) = one.said("console login")[0], one.said("console login failed")
    assert ((login["user"], login["client"]), failed["user"]) == (("anna", LOOPBACK), None)
    assert {word for word in ("swordfish", "hunter2", PASSWORD) if word in one.text()} == set()


# A proxy that says who it is


@pytest.fixture
def proxied(shared, users):
    """A console behind a proxy at this address, and file of users beside."""
    return shared(console_proxy=LOOPBACK, console_users=users.path, console_actions="on")


@whole_only
def test_whom_the_proxy_names_has_the_role_of_the_file(proxied):
    assert shown_person(proxied.get("/", **{HEADER: "petra"})) == ("petra", "operator")


def test_whom_the_proxy_names_and_nobody_else_knows_may_look(proxied):
    assert shown_person(proxied.get("/", **{HEADER: "stranger"})) == ("stranger", "viewer")


def test_from_another_address_than_the_proxys_no_header_lets_anybody_in(shared, users):
    one = shared(console_proxy="192.0.2.1", console_users=users.path, console_actions="on")

    answer = one.get("/", **{HEADER: "petra", "X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"})

    assert (answer.status, "use the address of the proxy" in answer.text) == (403, True)
    assert one.post("/login", {"name": "anna", "password": PASSWORD}).status == 403


@every("headers", [b"", b"X-Forwarded-User: petra\r\nX-Forwarded-User: vera\r\n", b"X-Forwarded-User:  \r\n"])
def test_a_proxy_that_does_not_say_one_name_lets_nobody_in(shared, headers):
    one = shared(console_proxy=LOOPBACK)

    answer = raw(one, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers + b"\r\n")

    assert answer.startswith("HTTP/1.1 403 ")


@every("header", ["X_Forwarded_User", "X-Forwarded-Email", "Remote-User"])
def test_another_header_names_nobody(proxied, header):
    assert proxied.get("/", **{header: "petra"}).status == 303


def test_a_name_that_is_html_is_only_text(proxied):
    text = proxied.get("/", **{HEADER: "<script>alert(1)</script>"}).text

    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


NO_NAMES = {
    "a space that does not break": b"petra\xc2\xa0",
    "a space as wide as an m": b"petra\xe2\x80\x83",
    "a next line": b"petra\xc2\x85",
    "no UTF-8": b"petra\xff",
    "endless": b"x" * 500,
}


@every("name", NO_NAMES.values())
def test_a_name_that_no_user_can_have_is_refused_and_is_never_another_s(proxied, name):
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"

    answer = raw(proxied, head + HEADER.encode() + b": " + name + b"\r\n\r\n")

    assert answer.startswith("HTTP/1.1 403 ")
    assert "petra" not in answer


# Requests that other sites have browsers send


FORGED = [
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"sec_fetch_site": ""},
    {"sec_fetch_site": "cross-site", "origin": "SELF"},
    {"sec_fetch_site": None, "origin": "https://evil.example"},
    {"sec_fetch_site": None, "origin": "null"},
    {"sec_fetch_site": None, "origin": "http://127.0.0.1:1"},
    {"sec_fetch_site": None, "origin": "http://[::1"},
    {"sec_fetch_site": None, "referer": "SELF"},
    {"sec_fetch_site": None},
]


@every("headers", FORGED)
@every("path", ["/login", "/logout", "/language/ja", "/act/pause", "/", "/static/console.css", "/nothing"])
def test_a_form_that_no_page_of_the_console_has_sent_is_refused(guarded, path, headers):
    cookie = session(guarded, "anna")
    headers = {name: value and value.replace("SELF", guarded.url) for name, value in headers.items()}

    answer = guarded.post(path, {"name": "anna", "password": PASSWORD}, cookie=cookie, **headers)

    assert (answer.status, answer.headers["set-cookie"]) == (403, None)
    assert "this form was not sent from a page of the console" in answer.text


@every(
    "headers",
    [{"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"}, {"sec_fetch_site": None, "origin": "SELF"}],
)
def test_a_form_of_the_console_itself_is_taken_also_from_an_older_browser(guarded, headers):
    headers = {name: value and value.replace("SELF", guarded.url) for name, value in headers.items()}

    assert guarded.post("/login", {"name": "anna", "password": PASSWORD}, **headers).status == 303


@every("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_no_other_method_does_anything(guarded, method):
    cookie = session(guarded, "anna")

    said = raw(
        guarded, f"{method} / HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n".encode()
    )

    assert int(said.split()[1]) in {400, 403, 405}


# Bodies


def test_a_form_that_is_too_large_is_refused_before_it_is_read(guarded):
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\nConnection: close\r\n"

    answer = raw(guarded, head + f"Content-Length: {MAX_FORM_BYTES + 1}\r\n\r\nname=a".encode())

    assert answer.startswith("HTTP/1.1 413 ")


def test_a_form_that_does_not_say_its_length_is_refused_too(guarded):
    port = int(guarded.settings["FORGEKEEPER_CONSOLE_PORT"])
    parts = (b"name=" + b"a" * 1023 for _ in range(MAX_FORM_BYTES // 1024 + 1))

    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
        connection.request("POST", "/login", parts, {"Sec-Fetch-Site": "same-origin"}, encode_chunked=True)
        answer = connection.getresponse()
        answer.read()

    assert answer.status == 413


def test_a_form_of_too_many_fields_is_refused(guarded):
    assert guarded.post("/login", [("a", "")] * 5_000).status == 400


# Every response


PATHS = ["/", "/nothing", "/static/console.css", "/static/nothing", "/static/../app.py", "/login", "/batches/none"]


@every("path", PATHS)
def test_every_response_has_the_headers_of_security(shared, guarded, path):
    open_to_all = shared().get(path)
    asked = guarded.get(path)

    for answer in (open_to_all, asked):
        assert {name: answer.headers.get_all(name) for name in RESPONSE_HEADERS} == {
            name: [RESPONSE_HEADERS[name]] for name in RESPONSE_HEADERS
        }


def test_refusals_have_them_too(guarded):
    for answer in (guarded.post("/", sec_fetch_site="cross-site"), guarded.get("/", **{"HX-Request": "true"})):
        assert {name: answer.headers[name] for name in RESPONSE_HEADERS} == RESPONSE_HEADERS


def test_the_policy_lets_nothing_inline_and_no_other_host_and_no_frame():
    policy = RESPONSE_HEADERS["Content-Security-Policy"]

    assert ("unsafe" in policy, "http" in policy, "*" in policy) == (False, False, False)
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("frame-ancestors 'none'")


@every("path", ["/", "/login", "/nothing"])
def test_nothing_on_a_page_is_inline(guarded, path):
    text = guarded.get(path, Cookie=session(guarded, "anna")).text

    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", text) == []


def test_no_page_is_kept_by_a_browser(guarded):
    cookie = session(guarded, "anna")

    assert {guarded.get(path, Cookie=cookie).headers["cache-control"] for path in ("/", "/login", "/no")} == {
        "no-store"
    }


def test_head_is_answered_as_get_without_the_page(shared):
    said = raw(shared(), b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")

    assert said.startswith("HTTP/1.1 200 ")
    assert said.endswith("\r\n\r\n")


def test_nobody_learns_what_serves_it(shared):
    answer = shared().get("/")

    assert answer.headers["server"] is None


def test_with_a_certificate_it_speaks_tls_and_its_sessions_never_go_without(console, users, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*line.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)

    one = console(console_users=users.path, console_tls_certificate=certificate, console_tls_key=key)
    answer = one.post("/login", {"name": "anna", "password": PASSWORD})

    assert one.url.startswith("https://")
    assert (answer.status, "secure" in answer.headers["set-cookie"].lower()) == (303, True)


STORE = '{"artifacts": "s3://bucket?region=eu&access_key_id=swordfish&secret_access_key=swordfish"}'


@whole_only
def test_no_page_shows_a_secret(console, users, urls):
    where = urlsplit(urls.database)
    url = where._replace(netloc=f"forgekeeper:swordfish@{where.netloc.rpartition('@')[2]}").geturl()
    one = console(console_users=users.path, console_actions="on", database_url=url, object_stores=STORE)
    cookie = one.log_in("anna", PASSWORD)

    texts = {path: one.get(path, Cookie=cookie).text for path in (*every_page(), "/login", "/nothing", "/act/pause")}

    assert {path for path, text in texts.items() if "swordfish" in text or HASH in text or "argon2" in text} == set()
    assert "swordfish" not in one.text()


def test_who_has_not_logged_in_learns_no_more_than_that_there_is_a_console(guarded):
    for text in (guarded.get("/login").text, guarded.post("/login", sec_fetch_site="cross-site").text):
        assert [word for word in ("prune", "user_status_cleanup", "/quarantine", read_version()) if word in text] == []


def test_what_was_done_is_said_once_on_the_next_page_and_not_to_one_that_renews_itself(guarded):
    cookie = session(guarded, "anna")
    done = guarded.post("/act/pause", {"batch": "prune", "until": "2h", "reason": "a <b>test</b>"}, cookie=cookie)
    said = done.headers["set-cookie"].partition(";")[0]
    both = f"{cookie}; {said}"

    renewed = guarded.get("/", Cookie=both, **{"HX-Request": "true"})
    shown = guarded.get("/", Cookie=both)

    assert done.status == 303, done.text
    assert ('class="notice" role="status"' in renewed.text, renewed.headers["set-cookie"]) == (False, None)
    assert 'class="notice" role="status"' in shown.text
    assert "max-age=0" in shown.headers["set-cookie"].lower()


def test_nobody_can_have_a_page_say_what_the_console_has_not_said(guarded):
    cookie = session(guarded, "anna")

    answer = guarded.get("/", Cookie=f"{cookie}; forgekeeper_said=eyJhIjoxfQ.a.b")

    assert 'class="notice" role="status"' not in answer.text


@every("path", ["/act/pause", "/act/stop", "/act/run"])
def test_a_viewer_acts_by_no_request_made_by_hand(guarded, path):
    cookie = session(guarded, "vera")

    answer = guarded.post(path, {"batch": "*", "reason": "because", "until": "2h"}, cookie=cookie)

    assert answer.status == 403
    assert (Hold.select().count(), Act.select().count()) == (0, 0)


def test_an_operator_acts_by_no_request_made_by_hand_where_actions_are_off(looking):
    fields = {"batch": "*", "reason": "x", "until": "2h"}

    answer = looking.post("/act/pause", fields, cookie=session(looking, "anna"))

    assert (answer.status, Hold.select().count()) == (403, 0)


def every_page():
    """The addresses of pages and of the API that need no row, and the addresses of each batch."""
    load_pages()
    load_endpoints()
    addresses = [page.address for page in DECLARED_PAGES] + [f"{API_ROOT}{one.address}" for one in DECLARED_ENDPOINTS]
    paths = [address for address in addresses if "{" not in address]
    of_batch = [address for address in addresses if address.count("{") == address.count("{batch}") == 1]
    return paths + [path.format(batch=batch) for path in of_batch for batch in BATCHES]


@whole_only
def test_a_console_that_only_looks_needs_only_the_rights_to_look(console, urls, database):
    (grants,) = re.findall(r"`(grant usage .* to forgekeeper_console)`", (ROOT / "docs" / "security.md").read_text())
    database.execute_sql(f"create role looker login; {grants.replace('forgekeeper_console', 'looker')}")
    # As any process does that serves: Redis belongs to this installation.
    claim_by_writing(client, Installation.ensure_id())
    with redis.from_url(urls.redis, decode_responses=True) as server:
        rights.make_users(server, "secret")
        server.acl_log_reset()
        name = urlsplit(urls.database)
        one = console(
            database_url=name._replace(netloc=f"looker@{name.netloc.rpartition('@')[2]}").geturl(),
            redis_url=urls.redis.replace("://", "://forgekeeper-console:secret@", 1),
        )

        refused = {path: answer for path in every_page() if "permission" in (answer := one.get(path).text)}

        assert (rights.refused(server), list(refused)) == ([], [])
        server.acl_deluser(*rights.users())
    one.kill()
    database.execute_sql("drop owned by looker; drop role looker")
