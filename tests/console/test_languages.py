"""A request finds the language of its page: by the cookie, else by the browser, else it is English."""

import re
from html import unescape

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.console.languages import LANGUAGE_COOKIE
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.pages import DECLARED_PAGES, load_pages
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import now
from tests.harness.every import every

BATCH, PASSWORD = "user_status_cleanup", "correct horse"
JAPANESE = {"Accept-Language": "ja-JP,ja;q=0.9,en;q=0.5"}
HEADINGS = re.compile(
    r"<(h[1-3]|th role=.columnheader.|dt|label|caption|button|summary)\b[^>]*>(.*?)</(?:\w+)>", re.DOTALL
)
"""Elements with a text of the console, not with a name or a text from outside."""
ALIKE = {"", "1", "ID", "English", *BATCHES, "Artifact", "Buckets", "Entity", "Import", "Ref"}
"""Texts that are the same in both languages: also what batches call their records and parts."""

load_pages()


@pytest.fixture
def guarded(shared, tmp_path_factory):
    """The console whose user, Anna, may act."""
    made = LineFile(tmp_path_factory.mktemp("users") / "users", USER_FORMAT)
    with made.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password(PASSWORD))
    return shared(console_users=made.path, console_actions="on")


def find_language(answer):
    """Return the language that the page names, if its texts are in it."""
    (named,) = re.findall(r'<html lang="(\w+)">', answer.text)
    assert {"ja": "本文へ移動", "en": "Skip to the content"}[named] in answer.text
    return named


@every(
    "headers, language",
    [
        ({}, "en"),
        ({"Accept-Language": "ja"}, "ja"),
        (JAPANESE, "ja"),
        ({"Accept-Language": "JA-jp ; q=0.5 , en;q=0.4"}, "ja"),
        ({"Accept-Language": "en-GB,en;q=0.9,ja;q=0.8"}, "en"),
        ({"Accept-Language": "de,fr;q=0.9"}, "en"),
        ({"Accept-Language": "de,ja;q=0.1"}, "ja"),
        ({"Accept-Language": "ja;q=0"}, "en"),
        ({"Accept-Language": ";q=,=;;*;q=x,ja_;-"}, "en"),
        (JAPANESE | {"Cookie": f"{LANGUAGE_COOKIE}=en"}, "en"),
        ({"Cookie": f"{LANGUAGE_COOKIE}=ja"}, "ja"),
        (JAPANESE | {"Cookie": f"{LANGUAGE_COOKIE}=../../en"}, "ja"),
    ],
)
def test_a_page_has_the_language_of_the_cookie_or_else_of_the_browser_or_else_english(shared, headers, language):
    assert find_language(shared().get("/nothing", **headers)) == language


def test_the_button_for_a_language_leads_back_to_the_page_and_keeps_the_language_without_a_login(guarded):
    page = "/login?next=%2Faudit%3Frun%3D1"
    (address,) = re.findall(r'<form method="post" action="([^"]*)"><button[^>]*>日本語<', guarded.get(page).text)

    answer = guarded.post(address, referer=guarded.url + page)

    cookie = answer.headers["set-cookie"]
    assert (answer.status, answer.headers["location"]) == (303, page)
    assert {"httponly", "samesite=lax"} <= {part.strip().lower() for part in cookie.split(";")}
    assert find_language(guarded.get("/login", Cookie=cookie.partition(";")[0])) == "ja"


@every("referer", [None, "https://evil.example/page", "SELF//evil.example/", "SELF/\\evil.example"])
def test_an_unknown_language_is_not_kept_and_the_button_leads_to_no_other_host(guarded, referer):
    answer = guarded.post("/language/tlh", referer=referer and referer.replace("SELF", guarded.url))

    assert (answer.status, answer.headers["location"], answer.headers["set-cookie"]) == (303, "/", None)


def list_pages():
    """Return the addresses of pages: of those of a batch, one for one batch."""
    parts = {"batch": BATCH, "run": 1, "id": "1", "time": "2026-01-01T00:00", "name": "quarantine"}
    return [re.sub(r"{(\w+)(?::\w+)?}", lambda part: str(parts[part[1]]), one.address) for one in DECLARED_PAGES]


def add_rows():
    """Add one of each thing that has a page or a part of the first page."""
    instant = now()
    run = dict.fromkeys(("tick", "claimed_at", "started_at", "finished_at"), instant)
    JobRun.create(batch=BATCH, state="failed", error="no space", attempt=1, **run)
    quarantine.record_failure(BATCH, "user_status", "815", "it is bad", reason="record_failed")
    Hold.add(BATCH, "breaker", reason="too much", by="worker-1")


def test_each_heading_label_and_button_of_each_page_is_japanese(guarded, database):
    add_rows()
    cookie = guarded.log_in("anna", PASSWORD)
    forms = [f"/act/{name}?batch={BATCH}" for name in ("run", "pause", "stop", "resume", "release")]
    paths = [*list_pages(), *forms, "/act/discard?id=1", "/act/flag?to=on&name=bulk_delete_job_artifacts", "/login"]

    answers = {path: guarded.get(path, Cookie=cookie, **JAPANESE) for path in paths}

    texts = {
        (path, " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split()))
        for path, answer in answers.items()
        if "/runbooks/" not in path  # their headings are names of alerts
        for _, text in HEADINGS.findall(answer.text.replace("<small>", "</label>"))
    }
    assert {path: answer.status for path, answer in answers.items()} == dict.fromkeys(paths, 200)
    assert {(path, text) for path, text in texts if text.isascii() and text not in ALIKE} == set()


def test_one_answer_of_the_servers_is_shown_in_both_languages_and_words_of_people_stay_as_they_are(shared, database):
    add_rows()

    japanese, english = (read_words(shared().get("/", **headers)) for headers in (JAPANESE, {}))

    assert re.search(rf"■ ホールド {BATCH} too much [\d.]+秒前 サーキットブレーカー", japanese)
    assert re.search(rf"■ held {BATCH} too much [\d.]+ s ago the circuit breaker", english)


def read_words(answer):
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())


def test_the_api_is_english(shared):
    answer = shared().get("/api/v1/batches/none", **JAPANESE)

    assert (answer.status, answer.text.isascii()) == (404, True)


def test_a_runbook_is_japanese(shared):
    text = shared().get("/runbooks/quarantine", **JAPANESE).text

    assert "<h2 id=" in text
    assert "このページは" in text
