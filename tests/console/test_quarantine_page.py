"""What lies in quarantine, filtered, a page at a time, and one by one."""

import re
from urllib.parse import quote

import pytest

from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.ledger import quarantine
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database as db
from models import DeletionStatus, GitRefDeletion
from tests.harness.stale_uploads import uploads

SCRIPT = "<script>alert(1)</script>"
MANY = """
    insert into quarantine (batch, record, key, reason, error, since, failed_at)
    select case when n %% 10 = 0 then 'prune' else 'user_status_cleanup' end, 'user_status', n::text,
        case when n %% 4 = 0 then 'child_failed' else 'record_failed' end, 'spoilt', now(), now()
    from generate_series(1, %s) as n
"""

pytestmark = pytest.mark.usefixtures("database")


def ids(text):
    return re.findall(r'<th [^>]*>(?:<input[^>]+> )?<a href="/quarantine/([^"]+)">', text)


def every_page(seen, path):
    """Return the ids on each page, from that path on."""
    found = []
    while path:
        text = seen(path).text
        found.append(ids(text))
        following = re.search(r'<a rel="next" href="([^"]+)"', text)
        path = following and "/quarantine" + following[1].replace("&amp;", "&")
    return found


def test_paging_shows_each_entry_once(seen):
    db.execute_sql(MANY, [230])

    pages = every_page(seen, "/quarantine")

    assert [len(page) for page in pages] == [100, 100, 30]
    assert [int(number) for page in pages for number in page] == list(range(1, 231))


def test_a_filter_holds_on_every_page(seen):
    db.execute_sql(MANY, [1200])

    pages = every_page(seen, "/quarantine?batch=user_status_cleanup&kind=child")

    wanted = [number for number in range(1, 1201) if number % 4 == 0 and number % 10]
    assert [int(number) for page in pages for number in page] == wanted


def test_the_page_says_how_many_there_are_in_all(seen):
    db.execute_sql(MANY, [1234])

    assert "<strong>1,234</strong> in all" in seen("/quarantine").text


def test_an_operator_chooses_some_and_nobody_else_can(console, tmp_path):
    db.execute_sql(MANY, [5])
    users = LineFile(tmp_path / "users", USER_FORMAT)
    with users.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password("correct horse"))
        known["vera"] = User("vera", "viewer", hash_password("correct horse"))
    one = console(console_users=users.path, console_actions="on")
    anna, vera = (one.get("/quarantine", Cookie=one.log_in(name, "correct horse")).text for name in ("anna", "vera"))

    assert re.findall(r'<input type="checkbox" name="id" value="(\d+)"', anna) == ["1", "2", "3", "4", "5"]
    assert 'formaction="/act/discard"' in anna
    assert "checkbox" not in vera
    assert "/act/" not in vera


def test_what_documents_keep_is_on_the_first_page_and_on_no_other(seen):
    db.execute_sql(MANY, [150])
    client.zadd(uploads.keys.failed, {"artifacts:folder/a": 1})
    refused = GitRefDeletion.create(project_id=7, ref="refs/x", status=DeletionStatus.REJECTED, reason="moved")

    first, second = every_page(seen, "/quarantine")

    assert sorted(first[100:]) == [f"ref%3A{refused.id}", "upload%3Aartifacts%3Afolder/a"]
    assert len(second) == 50


def test_what_is_of_no_such_kind_is_refused_by_a_sentence(seen):
    answer = seen("/quarantine?kind=sock")

    assert answer.status == 404
    assert "there is no kind" in answer.text


@pytest.mark.parametrize("after", ["x", "-1", "1e3", "9" * 30, "²"])
def test_a_page_after_what_is_no_number_is_refused_by_a_sentence(seen, after):
    assert seen(f"/quarantine?after={quote(after)}").status == 404


def test_one_is_shown_with_its_error_its_run_and_when_it_is_tried_again(seen):
    quarantine.record_failure(
        "git_ref_cleanup", "clean_project_refs", "clean_project_refs:7", "no HEAD", reason="child_failed", run=5
    )

    text = seen("/quarantine/1").text

    assert "no HEAD" in text
    assert 'href="/runs/5"' in text
    assert "child failed" in text


def test_what_a_document_keeps_is_shown_by_its_id(seen):
    client.zadd(uploads.keys.failed, {"artifacts:folder/a": 1})

    answer = seen("/quarantine/upload%3Aartifacts%3Afolder/a")

    assert (answer.status, "folder/a" in answer.text) == (200, True)


@pytest.mark.parametrize("number", ["99", "sock%3A1", "ref%3A5", "9" * 40])
def test_one_that_does_not_lie_there_is_missing(seen, number):
    assert seen(f"/quarantine/{number}").status == 404


def test_scripts_in_errors_keys_and_paths_are_escaped(seen):
    quarantine.record_failure(SCRIPT, SCRIPT, SCRIPT, SCRIPT, reason="record_failed")
    client.zadd(uploads.keys.failed, {SCRIPT: 1})
    GitRefDeletion.create(project_id=7, ref=SCRIPT, status=DeletionStatus.REJECTED, reason=SCRIPT)

    texts = [seen(path).text for path in ("/quarantine", "/quarantine/1", "/quarantine/ref%3A1")]

    assert all(SCRIPT not in text and "&lt;script&gt;" in text for text in texts)


def test_a_secret_in_an_error_is_masked(seen):
    quarantine.record_failure(
        "prune", "x", "1", "no answer from postgresql://forge:hunter2@db/forge", reason="record_failed"
    )

    text = seen("/quarantine/1").text

    assert "no answer from" in text
    assert "hunter2" not in text


def test_the_page_says_which_kind_is_not_known_where_redis_is_away(seen):
    quarantine.record_failure("prune", "x", "1", "spoilt", reason="record_failed")

    text = seen("/quarantine", redis_url="redis://127.0.0.1:1/0").text

    assert ids(text) == ["1"]
    assert "of kind upload are not known" in text
