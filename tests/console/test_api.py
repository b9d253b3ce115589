"""The API: its answers are the commands', its document is true, and its errors name a remedy."""

import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from datetime import timedelta
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import OpenAPIV31SpecValidator

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.audit.deletions import Audit
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.tokens import TOKEN_FORMAT, ApiToken, create_token, hash_token
from forgekeeper.cli.console.users import USER_FORMAT, User
from forgekeeper.cli.exclude import add_exclusion
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.platform.database.exclusions import ExclusionSubject
from forgekeeper.platform.installation import Installation, claim_by_writing
from tests.harness import forks
from tests.harness.artifacts import buckets
from tests.harness.audited import record_intent
from tests.harness.every import every
from tests.harness.leases import hold_lease
from tests.harness.performing import start_run
from tests.harness.programs import ROOT

NAME, REFS, ARTIFACTS = "user_status_cleanup", "git_ref_cleanup", "expired_job_artifacts"
MAY_BE_EMPTY = ("sentences", "general_warnings", "acts", "deletions", "object")
DAY, HOUR = timedelta(days=1), timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("database")


def add_runs():
    """A run with children, a run with a failed attempt, a run at work, and a skipped tick."""
    tick = now().replace(second=0, microsecond=0)
    children = start_run(REFS, JobRun.claim(REFS, tick - HOUR, by="sched-1:7", reason=None), by="worker-2:9")
    JobRun.succeed(children, {BATCHES[REFS].children[0].enqueued_as: 3})
    failed = {"attempt": 1, "worker": "worker-2:9", "started_at": tick.isoformat(), "error": "no route"}
    retried = start_run(NAME, JobRun.claim(NAME, tick - HOUR, by="sched-1:7", reason=None), by="worker-2:9")
    JobRun.succeed(retried, {"deleted": 150, "failures": [failed]})
    start_run(NAME, JobRun.claim(NAME, tick, by="sched-1:7", reason=None), by="worker-2:9")
    JobRun.create(batch="prune", tick=tick, state="skipped", reason="paused", claimed_at=tick, finished_at=tick)
    return children.id


def add_processes(run):
    at = now()
    work = [{"what": "clean_project_refs", "message_id": "clean_project_refs:3", "run": run, "seconds": 2.0}]
    row = {"host": "forge-1", "version": "0.9", "started_at": at - HOUR, "alive_at": at, "silent_from": at + DAY}
    Process.create(kind="worker", pid=7, queues=["git"], at_work=work, **row)
    Process.create(kind="scheduler", pid=8, timetable={NAME: "* * * * *"}, **row)


@pytest.fixture
def world(database):
    """An installation with something of everything; return the number of a run with children."""
    claim_by_writing(client, Installation.ensure_id())
    run = add_runs()
    add_processes(run)
    Hold.add(NAME, "pause", by="anna", reason="a release", until=now() + DAY)
    Hold.add("prune", "stop", by="vera", reason=None, until=None)
    Hold.add(ARTIFACTS, "breaker", by="worker-2:9", reason="9 of 10 records", until=None)
    add_exclusion(ExclusionSubject.from_text("project:7"), None, until=None, reason="a court asked for it")
    failed = {"reason": "child_failed", "run": run}
    quarantine.record_failure(REFS, "clean_project_refs", "clean_project_refs:2", "no HEAD", **failed)
    quarantine.record_failure(NAME, "user_status", "9", "spoilt", reason="record_failed", run=run)
    Audit(REFS, on=True, run=run, child="clean_project_refs:1").record_deleted("git_ref_deletion", ids=[7])
    Audit(ARTIFACTS, on=True, run=run).record_deleted(
        "expired_artifact", ids=[7, 8], project_id=[7, 9], path=["a", "b"]
    )
    record_intent(Audit("delete_objects", on=True, run=run), "deleted_object", ids=[55], names=["a"], path="a")
    acts.record_act("pause", NAME, batch=NAME, reason="a release", before={"paused": False}, after={"paused": True})
    with ExitStack() as stack:
        stack.enter_context(hold_lease(client, "clean_project_refs:7", ttl=HOUR, holder="forge-1:7"))
        buckets.tidy(client, 3, silent_for=DAY)
        stack.enter_context(buckets.hold_bucket(client, 3))
        yield run


@pytest.fixture
def read(seen):
    """Read an address of the API, which must answer."""

    def call(path, **settings):
        answer = seen(f"/api/v1{path}", **settings)
        assert answer.status == 200, answer.text
        return json.loads(answer.text)

    return call


def command(*words):
    """Return the JSON that a command prints."""
    ended = forks.run(["-m", "forgekeeper.cli", *words, "--json"], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


# Its document


def addresses(path, run, entry):
    """Return addresses with real values for the path's parameters: each batch, and each kind of question."""
    if path == "/batches/{batch}":
        return [f"/batches/{batch}" for batch in BATCHES]
    questions = {
        "/audit": ["what=artifact:7", "what=path:a", f"run={run}", "project=7", "who=nobody", "since=2h"],
        "/runs": [f"batch={NAME}&state=started&limit=1"],
    }
    whole = path.replace("{run}", str(run)).replace("{id}", entry)
    return [whole, *(f"{whole}?{question}" for question in questions.get(path, ()))]


def validate(document, path, answer):
    """Validate the answer of a path against its schema, with times."""
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    checker = FormatChecker(["date-time"])
    assert "date-time" in checker.checkers
    validator = Draft202012Validator(schema | {"components": document["components"]}, format_checker=checker)
    return [f"{path} {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(answer)]


def test_the_document_is_valid_openapi(read):
    document = read("/openapi.json")

    OpenAPIV31SpecValidator(document).validate()
    assert document["openapi"] == "3.1.0"


def test_each_answer_is_as_the_document_describes_it(read, world):
    document, entry = read("/openapi.json"), read("/quarantine")["entries"][0]["id"]
    wrong, empty = [], []
    for path in document["paths"]:
        for address in addresses(path, world, entry):
            answer = read(address)
            wrong += validate(document, path, answer)
            empty += [f"{path}: {name}" for name, found in answer.items() if found == [] and name not in MAY_BE_EMPTY]

    assert (wrong, empty) == ([], [])


def test_the_document_describes_each_error(seen, read):
    document = read("/openapi.json")
    schema = document["components"]["schemas"]["ProblemAnswer"]

    for path, status in (("/batches/nothing", 404), ("/runs?limit=0", 400)):
        answer = seen(f"/api/v1{path}")
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
        Draft202012Validator(schema).validate(json.loads(answer.text))
        assert str(status) in document["paths"]["/runs"]["get"]["responses"]


def test_times_are_utc(read, world):
    assert {one["started_at"][-6:] for one in read(f"/runs?batch={NAME}")["ticks"]} == {"+00:00"}


# Its page


PAGE = (ROOT / "docs" / "api.md").read_text()


def test_the_page_lists_each_address_with_its_parameters(read):
    listed = re.findall(r"^\| `(/\S*)` \| (.*?) \|", PAGE, re.MULTILINE)

    assert {address: re.findall(r"`(\w+)`", parameters) for address, parameters in listed} == {
        path: [one["name"] for one in described["get"]["parameters"] if one["in"] == "query"]
        for path, described in read("/openapi.json")["paths"].items()
    }


def test_the_examples_of_the_page_work_as_printed(shared, tmp_path):
    if shutil.which("curl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("curl is not installed (Debian: curl)")
    users, tokens, secret = (
        LineFile(tmp_path / "users", USER_FORMAT),
        LineFile(tmp_path / "tokens", TOKEN_FORMAT),
        create_token(),
    )
    with users.edit_lines() as known_users:
        known_users["anna"] = User("anna", "viewer", "-")
    with tokens.edit_lines() as known_tokens:
        known_tokens["example"] = ApiToken("example", now(), None, hash_token(secret))
    console = shared(console_users=users.path, console_tokens=tokens.path)
    examples = re.findall(r"^curl .*$", PAGE, re.MULTILINE)

    for example in examples:
        environment = os.environ | {"CONSOLE": console.url, "TOKEN": secret}
        ended = subprocess.run(["sh", "-c", example], env=environment, capture_output=True, text=True, check=False)
        assert (example, ended.returncode, ended.stderr) == (example, 0, "")
        assert json.loads(ended.stdout)

    assert len(examples) > 5


# Its answers are the commands'


def settled(facts):
    """Without the times at which two answers were made."""
    if isinstance(facts, dict):
        return {name: settled(one) for name, one in facts.items() if name not in {"at", "left", "next"}}
    return [settled(one) for one in facts] if isinstance(facts, list) else facts


def test_the_api_says_what_the_commands_say(read, world):
    different = []
    pairs = {
        "/status": ("status",),
        f"/runs?batch={NAME}": ("ticks", NAME),
        f"/runs/{world}": ("why", str(world)),
        "/quarantine": ("quarantine", "list"),
        "/quarantine/1": ("quarantine", "show", "1"),
        "/exclusions": ("exclude", "list"),
        "/processes": ("processes",),
        "/leases": ("leases", "list"),
        "/buckets": ("buckets",),
        "/audit?limit=20": ("audit",),
        "/audit?what=artifact:7&limit=20": ("audit", "--what", "artifact:7"),
        f"/audit?run={world}": ("audit", "--run", str(world)),
        "/audit?project=7": ("audit", "--project", "7"),
        "/audit?who=nobody": ("audit", "--who", "nobody"),
    }
    for path, words in pairs.items():
        from_api, from_command = settled(read(path)), settled(command(*words))
        different += [(path, from_api, from_command)] if from_api != from_command else []

    assert different == []


def test_a_batch_is_its_declaration_and_its_state(read, world):
    found = read(f"/batches/{NAME}")

    assert found["declared"] == command("batches", NAME)["batches"][NAME]
    assert settled(found["state"]) == settled(command("status")["batches"][NAME])
    assert [one["name"] for one in found["limits"]][:2] == ["records per run", "records per day"]
    assert settled(found["state"]) == settled(read("/batches")["batches"][NAME])


def test_a_run_has_the_numbers_of_its_children(read, world):
    assert read(f"/runs/{world}")["children"] == {"sent": 3, "at_work": 1, "failing": 1}


def test_no_answer_has_the_token_of_a_run(seen, world):
    tokens = [str(token) for run in JobRun.select() for token in (run.token, run.attempt_token) if token]

    texts = [seen(f"/api/v1{path}").text for path in ("/runs", f"/runs/{world}", "/status", f"/batches/{NAME}")]

    assert tokens
    assert [token for token in tokens for text in texts if token in text] == []


# Pages


def every_answer(read, path):
    """Return the answers from the first to the last."""
    answers = [read(path)]
    while cursor := answers[-1]["next"]:
        answers.append(read(f"{path}&cursor={quote(cursor)}"))
    return answers


def test_each_run_is_in_one_answer(read):
    for number in range(25):
        JobRun.create(batch=NAME if number % 5 else "prune", state="succeeded", finished_at=now())
    numbers = [run.id for run in JobRun.select().order_by(JobRun.id.desc())]

    answers = every_answer(read, "/runs?limit=10")

    assert [[one["id"] for one in answer["ticks"]] for answer in answers] == [
        numbers[:10],
        numbers[10:20],
        numbers[20:],
    ]


def test_each_entry_of_the_quarantine_is_in_one_answer(read):
    for number in range(25):
        quarantine.record_failure(NAME, "user_status", str(number), "spoilt", reason="record_failed", run=1)

    answers = every_answer(read, f"/quarantine?batch={NAME}&limit=10")

    assert [len(answer["entries"]) for answer in answers] == [10, 10, 5]
    assert len({one["id"] for answer in answers for one in answer["entries"]}) == 25
    assert {answer["total"] for answer in answers} == {25}


@pytest.fixture
def many_audited(database):
    """25 deletions and 12 acts of people."""
    for number in range(25):
        Audit(ARTIFACTS, on=True, run=77).record_deleted("expired_artifact", ids=[number], project_id=7)
    for number in range(12):
        acts.record_act("pause", f"batch-{number}")


@pytest.mark.usefixtures("many_audited")
@every("question, acts_in_all", [("since=1d", 12), ("run=77", 0), ("project=7", 0)])
def test_each_entry_of_the_audit_is_in_one_answer(read, question, acts_in_all):
    answers = every_answer(read, f"/audit?{question}&limit=10")

    deleted = [str(one.get("ids", one.get("id"))) for answer in answers for one in answer["deletions"]]
    paused = [one["what"] for answer in answers for one in answer.get("acts", [])]
    assert [len(answer["deletions"]) for answer in answers] == [10, 10, 5]
    assert (len(set(deleted)), len(paused), len(set(paused))) == (25, acts_in_all, acts_in_all)


# Errors

WRONG = [
    ("/batches/nothing", 404, "there is no batch 'nothing'; there are: "),
    ("/runs/99", 404, "the ledger has no run 99; `forgekeeper ticks BATCH` lists the runs of a batch"),
    ("/runs/one", 400, "'one' is not a number: write the number of a run, such as 12"),
    ("/quarantine/99", 404, "99 is not in quarantine; `forgekeeper quarantine` lists the entries"),
    ("/runs?batch=nothing", 400, "there is no batch 'nothing'; there are: "),
    ("/runs?state=lost", 400, "there is no state 'lost'; there are: "),
    ("/runs?limit=501", 400, "an answer has at most 500 entries: follow `next` for more"),
    ("/runs?limit=0", 400, "'0' is not a number: write the number of entries, such as 12"),
    ("/runs?limit=", 400, "give the parameter limit one value, or leave it out"),
    ("/runs?limit=1&limit=2", 400, "give the parameter limit one value, or leave it out"),
    ("/runs?turn=1", 400, "there is no parameter 'turn'; there are: batch, state, limit, cursor"),
    ("/audit?what=artifact:7&run=1", 400, "use only one of these: what, project, run, who"),
    ("/audit?what=nothing:7", 400, "'nothing:7' does not name a kind of record: write "),
    ("/audit?cursor=7", 400, "'' is not a number: write the number of the last answer's `next`, such as 12"),
    ("/audit?since=soon", 400, "'soon' is not a time: write it as "),
    ("/nothing", 404, "the API has no such address: /api/v1/openapi.json lists its addresses"),
    ("/../../api", 404, "the API has no such address: /api/v1/openapi.json lists its addresses"),
]


@every("path, status, sentence", WRONG)
def test_an_error_says_what_to_do(seen, path, status, sentence):
    answer = seen(f"/api/v1{path}")

    found = json.loads(answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status, found["status"], found["detail"][: len(sentence)]) == (status, status, sentence)


def test_while_postgresql_is_away_the_api_says_so_and_gives_no_old_answer(seen):
    answer = seen("/api/v1/status", database_url="postgresql://u@127.0.0.1:1/d")

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "cannot use PostgreSQL" in json.loads(answer.text)["detail"]


@every("path", ["/leases", "/buckets"])
def test_while_redis_is_away_what_only_redis_knows_is_refused(seen, path):
    answer = seen(f"/api/v1{path}", redis_url="redis://127.0.0.1:1/0")

    assert (answer.status, "Redis" in json.loads(answer.text)["detail"]) == (503, True)


def test_while_redis_is_away_the_rest_is_answered_with_its_error(read):
    found = read("/queues", redis_url="redis://127.0.0.1:1/0")

    assert "Redis" in found["redis"]["trouble"]
    assert {one["ready"] for one in found["queues"].values()} == {None}
