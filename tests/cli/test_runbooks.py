"""Every command that a runbook tells people to type is typed here, at servers with something of everything in them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.locks import lease
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.quarantine import Quarantined
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
DOTS = {"--until ...": "--until 2100-01-01", "--reason ...": "--reason 'it does harm'"}
"""What a runbook leaves to its reader."""
STATUSES: dict[str, int] = {}
"""What a command ends with by right, where that is not 0."""
SERVING = {"worker", "scheduler", "exporter"}
OTHERS = {"redis", "psql"}
LIMIT = 60.0


def commands(page):
    """List the page's commands: lines of its blocks, and what stands between single backquotes elsewhere."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [line for line in (*lines, *spans) if line.startswith("forgekeeper ")]


ALL = sorted({command for page in PAGES.values() for command in commands(page)})


def typed(command, ids):
    """Put in what a reader puts in, and split it as a shell does."""
    for dots, meant in DOTS.items():
        command = command.replace(dots, meant)
    words = shlex.split(command)[1:]
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
    GitRefDeletion.create(project_id=1, ref="HEAD", reason="not_under_refs", status=DeletionStatus.REJECTED)
    DeletedObject.create(store_dir="a", file="b", attempts=MAX_ATTEMPTS)
    register.prepare(client, "artifacts", "c/d")
    run = JobRun.start_here(BATCH, by="worker-1:9")
    JobRun.fail(run, "no such thing", delay=timedelta(0), retries=0)
    return {"quarantine ": "1"}


def bring_back():
    """Let there be again what a command may have ended, and nothing be held back."""
    Hold.delete().execute()
    Quarantined.delete().execute()
    Quarantined.create(
        id=1, batch="git_ref_cleanup", record="clean_project_refs", key="1", reason="child_failed", error="no HEAD",
        since=now(), failed_at=now(),
    )  # fmt: skip


@contextmanager
def waited_for(monkeypatch):
    """Let a program that takes a command's place be a child, for the test to go on after it."""

    def run(program, arguments, environment):
        ended = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        sys.stdout.write(ended.stdout)
        sys.stderr.write(ended.stderr)
        raise SystemExit(ended.returncode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "execve", run)
        yield


def test_the_runbooks_have_commands():
    assert len(ALL) > 100
    assert {command.split()[1] for command in ALL} >= SERVING | OTHERS


def test_nothing_in_a_command_is_left_to_be_guessed(world):
    for command in ALL:
        words = typed(command, world)
        assert "" not in words, command
        assert words[0] in OTHERS or not [word for word in words if re.fullmatch(r"[A-Z]{2,}|.*\.\.\.", word)], command


def test_every_command_of_every_runbook_does_what_it_should(main, monkeypatch, world):
    for program in ("psql", "redis-cli"):
        if shutil.which(program) is None:
            assert "CI" not in os.environ, f"{program} is missing: .ci/run installs it"
            pytest.skip(f"{program} is not installed")
    wrong = []
    for command in ALL:
        words = typed(command, world)
        if words[0] in SERVING:
            continue
        bring_back()
        with lease(client, LEASE, ttl=timedelta(minutes=1), holder="forge-2:77"), waited_for(monkeypatch):
            result = main(*words)
        # redis-cli ends well whatever Redis says.
        refused = words[0] == "redis" and re.match(r"\(?error|ERR|WRONGTYPE|NOSCRIPT", result.stdout)
        if result.status != STATUSES.get(command, 0) or refused:
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
