"""What goes wrong before anything works: each is a sentence that says what to do."""

from urllib.parse import urlsplit
from uuid import uuid4

import pytest


@pytest.fixture
def plain_role(settings, new_database, query):
    """A database's URL as a role that may do nothing in it, its URL as the owner's, and the role."""
    url, name = new_database(), f"r{uuid4().hex}"
    query(url, f"create role {name} login")
    parts = urlsplit(url)
    yield parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl(), url, name
    query(url, f"drop owned by {name}; drop role {name}")


def test_a_role_that_may_make_no_tables_is_said_who_migrates(main, plain_role):
    result = main("migrate", DATABASE_URL=plain_role[0])

    assert result.status == 1
    assert result.complaint == (
        "permission denied for schema public: nothing was changed; run `forgekeeper migrate` as the role that owns "
        "forgekeeper's tables, or, before there are any, `grant usage, create on schema public to ROLE` "
        "(docs/security.md)"
    )


def test_what_a_role_is_said_to_need_is_enough_to_migrate(main, plain_role, query):
    as_role, url, name = plain_role
    query(url, f"grant usage, create on schema public to {name}")

    assert main("migrate", DATABASE_URL=as_role).status == 0
