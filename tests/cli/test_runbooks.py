"""Every command that a runbook tells people to type is typed here, at servers with something of everything in them."""

import os
import re
import shlex
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dramatiq import Message
from forgekeeper.delivery.enqueue_unique import enqueue_unique

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.locks import lease
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import MAX_ATTEMPTS, DeletedObject
from models import DeletionStatus, GitRefDeletion, Project
from tests.harness import samples as sample
from tests.harness.installation import INSTALLATION
from tests.harness.ports import free_ports
from tests.harness.programs import Program, eventually
from workers.stale_direct_uploads import register

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
PAGES = {page.stem: page.read_text() for page in sorted(RUNBOOKS.glob("*.md"))}
BATCH, LEASE = "user_status_cleanup", "clean_project_refs:7"
LETTER = "clean_project_refs:1"
DOTS = {"--until ...": "--until 2100-01-01", "--reason ...": "--reason 'it does harm'"}
"""What a runbook leaves to its reader."""
SERVING = {"worker", "scheduler", "exporter"}
OTHERS = {"redis-cli", "psql"}
LIMIT = 60.0


def commands(page):
    """List the page's commands: lines of its blocks, and what stands between single backquotes elsewhere."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [line for line in (*lines, *spans) if line.split(" ")[0] in {"forgekeeper", *OTHERS}]


ALL = sorted({command for page in PAGES.values() for command in commands(page)})


def typed(command, ids):
    """Put in what a reader puts in, and split it as a shell does."""
    for dots, meant in DOTS.items():
        command = command.replace(dots, meant)
    words = shlex.split(command)[1 if command.startswith("forgekeeper ") else 0 :]
    subject = next((subject for subject in ids if " ".join(words).startswith(subject)), None)
    known = {"BATCH": BATCH, "NAME": LEASE, "QUEUE": "cron", "PROJECT": "1", "N": "1000", "ID": ids.get(subject, "")}
    return [re.sub(rf"\b({'|'.join(known)})\b", lambda match: known[match[1]], word) for word in words]


@pytest.fixture
def places(tmp_path, monkeypatch, settings):
    """A root and a store with their sentinels."""
    root, store = tmp_path / "repositories", tmp_path / "artifacts"
    for folder in (root, store):
        folder.mkdir()
        sentinel.Folder(folder).create_sentinel(INSTALLATION)
    stores = f'{{"artifacts": "file://{store}"}}'
    monkeypatch.setenv("FORGEKEEPER_REPOSITORIES_ROOT", str(root))
    monkeypatch.setenv("FORGEKEEPER_OBJECT_STORES", stores)


@pytest.fixture
def world(database, places):
    """Something of everything: what is due, what was given up, a run that failed; return the ids of what is asked for."""
    sample.user_statuses(5)
    Project.create(id=1, disk_path="a/b.git")
    rejected = GitRefDeletion.create(project_id=1, ref="HEAD", reason="not_under_refs", status=DeletionStatus.REJECTED)
    DeletedObject.create(store_dir="a", file="b", attempts=MAX_ATTEMPTS)
    register.prepare(client, "artifacts", "c/d")
    run = JobRun.start_here(BATCH, by="worker-1:9")
    JobRun.fail(run, "no such thing", delay=timedelta(0), retries=0)
    return {"refs retry": str(rejected.id), "dead ": LETTER}


def bring_back():
    """Let there be again what a command may have ended, and nothing be held back."""
    Hold.delete().execute()
    if not client.exists(f"{broker.namespace}:git.XQ"):
        client.delete(f"{broker.namespace}:git", f"{broker.namespace}:git.msgs")
        enqueue_unique(broker, Message("git", "clean_project_refs", (1,), {}, {}, LETTER))
        broker.do_fetch("git", 1)
        broker.do_nack("git", LETTER)


def asked(words, urls):
    """Let PostgreSQL's or Redis's own client ask; return what it has refused."""
    program, *arguments = words
    if program == "psql":
        line = [program, urls.database, *arguments[1:]]
    else:  # redis-cli reads no URL of a socket
        line = [program, "-s", urlsplit(urls.redis).path, *arguments[2:]]
    ended = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    # redis-cli ends well whatever Redis says.
    refused = program == "redis-cli" and re.match(r"\(?error|ERR|WRONGTYPE|NOSCRIPT", ended.stdout)
    return ended if ended.returncode or refused else None


def test_the_runbooks_have_commands():
    assert len(ALL) > 100
    assert {word for command in ALL for word in command.split()[:2]} >= SERVING | OTHERS


def test_nothing_in_a_command_is_left_to_be_guessed(world):
    for command in ALL:
        words = typed(command, world)
        assert "" not in words, command
        assert words[0] in OTHERS or not [word for word in words if re.fullmatch(r"[A-Z]{2,}|.*\.\.\.", word)], command


def test_every_command_of_every_runbook_does_what_it_should(main, urls, world):
    for program in OTHERS:
        if shutil.which(program) is None:
            assert "CI" not in os.environ, f"{program} is missing: .ci/run installs it"
            pytest.skip(f"{program} is not installed")
    wrong = []
    for command in ALL:
        words = typed(command, world)
        if words[0] in SERVING:
            continue
        if words[0] in OTHERS:
            wrong += filter(None, [asked(words, urls)])
            continue
        bring_back()
        with lease(client, LEASE, ttl=timedelta(minutes=1), holder="forge-2:77"):
            result = main(*words)
        if result.status != 0:
            wrong.append((command, result))

    assert wrong == []


@pytest.mark.parametrize("command", [command for command in ALL if command.split()[1] in SERVING])
def test_every_command_that_serves_begins_and_ends_when_told_to(world, command, tmp_path):
    (port,) = free_ports(1)
    settings = {"metrics_port_exporter": port, "worker_processes": 1, "log_format": "json"}
    serving = Program(tmp_path / "log", "-m", "forgekeeper.cli", *typed(command, world), **settings)
    try:
        eventually(lambda: re.search(r"started|ready for action", serving.text()))
        assert serving.end() == 0, serving.text()
    finally:
        serving.kill()
