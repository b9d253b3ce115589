"""Everybody with the rights that docs/security.md lists, and no more: roles, users, and who looks for refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import cycle
from urllib.parse import urlsplit

from tests.system.service import LIMIT, ROOT

PAGE = ROOT / "docs" / "security.md"
PREFIX = "limited_"
PERSON = "forgekeeper"
"""The role and the user of whoever types commands."""
COMMANDS = (
    *("status", "check", "leases", "buckets", "processes", "quarantine"),
    *("objects held", "ticks prune", "why prune", "flags", "send stale_imports"),
)
"""What a person types while everything goes wrong; what changes more would have to be in the history."""
REFUSALS = re.compile(r"NOPERM|no permissions|permission denied for (?:table|schema|sequence)")
EVERY = 1.0


def grants():
    """Return what the page grants, as SQL, by role."""
    blocks = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {re.search(r" to (\w+);", block)[1]: block for block in blocks}


def users():
    """Return the rules of each user of Redis as the page has them, by name."""
    lines = re.findall(r"^ACL SETUSER (\S+) (.*)$", PAGE.read_text(), re.MULTILINE)
    return {name: rules.split() for name, rules in lines}


def make_roles(ask):
    """Make the roles, with *ask* to do it as the owner of all tables, who has one of these names already."""
    for role, sql in grants().items():
        ask(f"create role {PREFIX}{role} login; {sql.replace(' to ', f' to {PREFIX}')}")


def make_users(client, secret):
    """Make the users, each with the same password."""
    for name, rules in users().items():
        client.execute_command("ACL", "SETUSER", name, *(rule.replace("SECRET", secret) for rule in rules))


def started_with(secret):
    """Yield the users with which a server is started, and their rules: all have the same password."""
    for name, rules in users().items():
        yield name, [rule.replace("SECRET", secret) for rule in rules if rule != "reset"]


def names(command):
    """Return the role and the user of a command."""
    own = command in {"scheduler", "worker", "exporter"}
    return (f"{PREFIX}{PERSON}_{command}", f"{PERSON}-{command}") if own else (f"{PREFIX}{PERSON}", PERSON)


def urls(command, database_url, redis_url, secret):
    """Lead a command to the servers as who it is; the URLs name nobody, or somebody else."""
    role, user = names(command)
    database, server = urlsplit(database_url), urlsplit(redis_url)
    host = server.netloc.rpartition("@")[2]
    return {
        "FORGEKEEPER_DATABASE_URL": database._replace(
            netloc=f"{role}:{secret}@{database.netloc.rpartition('@')[2]}"
        ).geturl(),
        "FORGEKEEPER_REDIS_URL": server._replace(netloc=f"{user}:{secret}@{host}").geturl(),
    }


def refused(client):
    """Say what Redis has refused to whom; the server's own user is the test's."""
    return [
        f"{entry['username']} was refused {entry['object']} ({entry['reason']}, {entry['context']})"
        for entry in client.acl_log()
        if entry["username"] in users() and entry["object"] != "info"
    ]


class Visitor(threading.Thread):
    """A person who types commands, and a Prometheus that scrapes the exporter, until stopped; notes what is refused."""

    def __init__(self, rig, exporter):
        super().__init__(name="visitor", daemon=True)
        self._rig = rig
        self._exporter = exporter
        self._stopped = threading.Event()
        self.visits = 0

    def stop(self):
        self._stopped.set()
        self.join()

    def run(self):
        for words in cycle(COMMANDS):
            if self._stopped.wait(EVERY):
                return
            with suppress(OSError, HTTPException):
                urllib.request.urlopen(f"http://127.0.0.1:{self._exporter.port}/metrics", timeout=5).close()
            said = self._type(words)
            if REFUSALS.search(said):
                self._rig.history.sample("refused", sentence=f"`forgekeeper {words}` said: {said[-500:]}")
            self.visits += 1

    def _type(self, words):
        service = self._exporter
        ended = subprocess.run(
            [sys.executable, "-m", "forgekeeper.cli", *words.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT), **self._rig.person(service)},
            cwd=service.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=4 * LIMIT,
        )
        return ended.stdout + ended.stderr


def restrict(rig):
    """Make all roles; return who will look for refusals."""
    make_roles(rig.ask)
    (exporter,) = (service for service in rig.services if service.arguments == ("exporter",))
    return Visitor(rig, exporter)


def producer(servers):
    """Return how the forge connects to the register of uploads."""
    return partial(servers.redis, username="forgekeeper-uploads", driver_info=None)
