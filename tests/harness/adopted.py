"""GitLab's tables and views of them in the test database, and the role that forgekeeper connects as."""

from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import psycopg2
import pytest

from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.settings import PREFIX
from forges import adoption
from forges.gitlab.adoption import ADOPTION_CLASS
from tests.harness import gitlab_tables
from tests.harness.gitlab_tables import TABLES
from tests.harness.settings import settings_with
from tests.harness.tables import empty

VIEWS, KEEPER = "forgekeeper_gitlab", "keeper"
# docs/security.md lists the rights that the role needs on forgekeeper's tables; here it has all rights.
ROLE = f"""
    create role {KEEPER} login;
    grant usage on schema forgekeeper to {KEEPER};
    grant select, insert, update, delete on all tables in schema forgekeeper to {KEEPER}
"""
SMALL = {"artifacts": 600, "statuses": 40, "imports": 80, "deletions": 200}


def as_keeper(url):
    """Return the URL of the database for the role `keeper`."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{KEEPER}@{parts.netloc.rpartition('@')[2]}").geturl()


@contextmanager
def session(url):
    """Open a session and yield its cursor; uncommitted changes are rolled back."""
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        yield cursor


@contextmanager
def tables_of_gitlab(url, **counts):
    """Create and fill GitLab's tables; yield a cursor of their owner; drop the tables and all views."""
    with session(url) as cursor:
        cursor.connection.autocommit = True
        gitlab_tables.build(cursor)
        gitlab_tables.fill(cursor, **counts)
        yield cursor
        cursor.execute(f"drop schema if exists {VIEWS} cascade")
        gitlab_tables.remove(cursor)


@contextmanager
def role_of_forgekeeper(cursor):
    """Create the role with rights only on forgekeeper's tables; drop it at the end."""
    cursor.execute(ROLE)
    yield
    cursor.execute(f"drop owned by {KEEPER}; drop role {KEEPER}")


def adopt(changed=str, kind=ADOPTION_CLASS, **changes):
    """Create the views as `forgekeeper adopt` does, with its script changed by *changed*; return the plan."""
    found = adoption.plan_adoption(kind, **{"tables": TABLES, "views": VIEWS, "role": KEEPER} | changes)
    with db.database.atomic():
        db.database.execute_sql(changed("\n".join(found.write_statements())).replace("%", "%%"))
    return found


@pytest.fixture(scope="module")
def adopted(urls, _migrated):
    """GitLab's tables with views, shared by the tests of a file; yields a cursor of the owner."""
    with tables_of_gitlab(urls.database, **SMALL) as cursor, role_of_forgekeeper(cursor):
        settings = settings_with(database_url=urls.database, redis_url=urls.redis)
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=2)
        with db.database.connection_context():
            adopt()
        yield cursor


@pytest.fixture
def owner(urls, adopted):
    """Cursor of the tables' owner, in a transaction that is rolled back."""
    with session(urls.database) as cursor:
        cursor.execute(f"set search_path = {TABLES}")
        yield cursor
        cursor.connection.rollback()


@pytest.fixture
def keeper(urls, adopted):
    """Cursor of the role without rights on the tables, in a transaction that is rolled back."""
    with session(as_keeper(urls.database)) as cursor:
        cursor.execute(f"set search_path = forgekeeper, {VIEWS}")
        yield cursor
        cursor.connection.rollback()


def connected(settings):
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=2)
    return db.database.connection_context()


@contextmanager
def adopted_gitlab(urls, patch, changes=""):
    """Connect as the role to views of filled tables with these *changes*; yield a cursor of the owner."""
    with tables_of_gitlab(urls.database, **SMALL) as cursor, role_of_forgekeeper(cursor):
        cursor.execute(changes or "select")
        with connected(settings_with(database_url=urls.database, redis_url=urls.redis)):
            empty()
            client.flushdb()
            adopt()
        db.database.close_all()
        patch.setenv(PREFIX + "FORGE_SCHEMA", VIEWS)
        patch.setenv(PREFIX + "DATABASE_URL", as_keeper(urls.database))
        with connected(settings_with()):
            yield cursor
        db.database.close_all()


@pytest.fixture
def gitlab(settings, urls, _migrated, monkeypatch):
    """Connect as the role to views of filled tables; yield a cursor of the tables' owner."""
    with adopted_gitlab(urls, monkeypatch) as cursor:
        yield cursor
