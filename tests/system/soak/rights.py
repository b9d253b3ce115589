"""Everybody with the rights that docs/security.md lists, and no more: roles, users, and what they were refused."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tests.harness.programs import ROOT

PAGE = ROOT / "docs" / "security.md"
PREFIX = "limited_"
PERSON = "forgekeeper"
"""The role and the user of whoever types commands."""
REFUSALS = re.compile(r"NOPERM|no permissions|permission denied for (?:table|schema|sequence)")


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


def urls(command, database_url, redis_url, secret):
    """Lead a command to the servers as who it is; the URLs name nobody, or somebody else."""
    own = command in {"scheduler", "worker", "exporter"}
    role, user = (f"{PERSON}_{command}", f"{PERSON}-{command}") if own else (PERSON, PERSON)
    database, server = urlsplit(database_url), urlsplit(redis_url)
    host = server.netloc.rpartition("@")[2]
    there = f"{PREFIX}{role}:{secret}@{database.netloc.rpartition('@')[2]}"
    return {
        "database_url": database._replace(netloc=there).geturl(),
        "redis_url": server._replace(netloc=f"{user}:{secret}@{host}").geturl(),
    }


def refused(client):
    """Say what Redis has refused to whom; the server's own user is the test's."""
    return [
        f"{entry['username']} was refused {entry['object']} ({entry['reason']}, {entry['context']})"
        for entry in client.acl_log()
        if entry["username"] in users() and entry["object"] != "info"
    ]
