"""What people did and what was deleted: answered as `forgekeeper audit` answers it, a page at a time."""

import html
import re
import subprocess
import sys
from datetime import timedelta

import pytest

from forgekeeper.audit import acts, lookup
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Audit, Deletion, IntentOutcome
from forgekeeper.platform.database import now
from tests.harness.audited import record_intent
from tests.harness.html import read_rows
from tests.harness.programs import ROOT
from tests.harness.thorough import whole_only

SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def artifacts():
    """What the batch of artifacts says of those that it has deleted."""
    return Audit("expired_job_artifacts", on=True, run=77)


def sentences(text):
    return [html.unescape(re.sub("<[^>]+>", "", one)) for one in re.findall(r"<p>(.*?)</p>", text)]


@whole_only
def test_who_deleted_one_thing_is_answered_in_the_sentences_of_the_command(seen, artifacts):
    artifacts.record_deleted("job_artifact", ids=[7, 8], project_id=[7, 9], path=["a", "b"])
    command = [sys.executable, "-m", "forgekeeper.cli", "audit", "--what", "artifact:7"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert sentences(seen("/audit?what=artifact:7").text) == said.splitlines()


def test_what_was_deleted_of_a_project_today_is_answered_by_its_number_alone(seen, artifacts):
    artifacts.record_deleted("job_artifact", ids=[1, 2, 3], project_id=[7, 9, 7], path=["a", "b", "c"])

    text = seen("/audit?project=7").text

    assert "expired_job_artifacts: 2 job_artifact of project 7 deleted." in sentences(text)
    assert [row[4] for row in read_rows(text)] == ["job_artifact 1", "job_artifact 3"]


def test_what_was_deleted_of_a_project_is_shown_by_batch_and_page_by_page(seen, artifacts):
    artifacts.record_deleted("job_artifact", ids=[*range(150)], project_id=7)
    Audit("git_ref_cleanup", on=True, run=4).record_deleted("git_ref_deletion", ids=[1], project_id=7)
    query = "/audit?project=7&batch=expired_job_artifacts"

    pages = [[row[4] for row in read_rows(seen(f"{query}{more}").text)] for more in ("", "&page=2")]

    assert [len(page) for page in pages] == [100, 50]
    assert {*pages[0], *pages[1]} == {f"job_artifact {number}" for number in range(150)}


def test_what_is_about_to_go_of_a_project_is_not_said_to_be_gone(seen):
    refs = Audit("git_ref_cleanup", on=True, run=4)
    of = {"project_id": 7, "ref": ["x", "y"]}
    (intent,) = record_intent(refs, "git_ref_deletion", ids=[1, 2], names=["x", "y"], **of)
    before = sentences(seen("/audit?project=7").text)
    refs.record_outcomes(
        "git_ref_deletion", [IntentOutcome(intent, [1, 2], ["x", "y"], of | {"state": ["deleted", "moved"]})]
    )
    after = sentences(seen("/audit?project=7").text)

    assert before == ["git_ref_cleanup: 2 git_ref_deletion of project 7 not known yet."]
    assert after == [f"git_ref_cleanup: 1 git_ref_deletion of project 7 {state}." for state in ("deleted", "moved")]


def test_where_not_all_of_a_project_is_looked_through_that_is_said(artifacts, monkeypatch):
    monkeypatch.setattr(lookup, "MAX_SEARCHED_LINES", 3)
    for number in range(3):
        artifacts.record_deleted("job_artifact", ids=[number], project_id=7)

    found, whole = lookup.list_of_project(7, "expired_job_artifacts", now() - timedelta(hours=1))

    assert (len(found), whole) == (3, False)


def test_what_was_deleted_before_today_is_there_since_the_time_that_is_said(seen, artifacts):
    artifacts.record_deleted("job_artifact", ids=[1], project_id=7)

    nothing = seen("/audit?project=7&since=0s").text
    assert "The audit has no deletions in project 7" in nothing
    assert "It reaches back to " in nothing
    assert "1 job_artifact of project 7" in seen("/audit?project=7&since=1h").text


def test_acts_and_deletions_are_shown_newest_first_and_each_once(seen, artifacts):
    for number in range(250):
        acts.record_act("pause", f"act-{number}")
    for number in range(120):
        artifacts.record_deleted("job_artifact", ids=[number], project_id=7)
    path, pages = "/audit", []

    while path:
        text = seen(path).text
        pages.append(read_rows(text))
        following = re.search(r'<a rel="next" href="([^"]+)"', text)
        path = following and "/audit" + html.unescape(following[1])

    shown = [row[3] for page in pages for row in page]
    assert [len(page) for page in pages] == [100, 100, 100, 70]
    assert shown == ["1 job_artifact"] * 120 + [f"act-{number}" for number in reversed(range(250))]


def test_a_person_is_shown_with_acts_alone_and_why(seen, artifacts):
    with acts.recording_acts(on=True, actor="alice"):
        acts.record_act("pause", "prune", reason="a test of mine", before={"holds": []}, after={"holds": ["pause"]})
    acts.record_act("pause", "stale_imports")
    artifacts.record_deleted("job_artifact", ids=[1])

    ((_, by, how, what, why),) = read_rows(seen("/audit?who=alice").text)

    assert ("alice" in by, what, why) == (True, "prune", "a test of mine")
    assert how.startswith("pause before and after")


def test_a_run_is_added_up(seen, artifacts):
    artifacts.record_deleted("job_artifact", ids=[1, 2, 3])

    text = seen("/audit?run=77").text

    assert "Run 77 of expired_job_artifacts: 3 job_artifact deleted" in text
    assert 'href="/runs/77"' in text


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("what=sock:1", "does not name a kind of record: write "),
        ("project=x", "is not a number: write the number of a project"),
        ("run=-1", "is not a number: write the number of a run"),
        ("since=yesterday-ish", "is not a time"),
        ("run=1&who=alice", "use only one of these"),
    ],
)
def test_what_cannot_be_asked_is_said_above_the_form(seen, query, sentence):
    answer = seen(f"/audit?{query}")

    assert answer.status == 200
    assert sentence in answer.text
    assert '<form class="filter"' in answer.text


def test_scripts_in_what_is_recorded_and_in_the_question_are_escaped(seen):
    Act.create(act=SCRIPT, what=SCRIPT, by_user=SCRIPT, by_host=SCRIPT, actor=SCRIPT, reason=SCRIPT, before=SCRIPT)
    Deletion.create(batch=SCRIPT, record=SCRIPT, run=1, phase="done", ids=[1], hashes=[], detail={SCRIPT: SCRIPT})

    for query in ("", "run=1", "who=%3Cscript%3Ealert(1)%3C/script%3E", "what=%3Cscript%3Ealert(1)%3C/script%3E"):
        text = seen(f"/audit?{query}").text
        assert SCRIPT not in text
        assert "&lt;script&gt;" in text
