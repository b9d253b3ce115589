"""What previews are tried on, besides the documents: the batch of the examples."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from forgekeeper.database import database as db
from forgekeeper.storage import stores
from tests.harness.toys import declaring

EXAMPLE = "stale_pipelines"
FOLDER = Path(__file__).parents[2] / "examples" / EXAMPLE
TABLE = "create table pipelines (id bigint primary key, updated_at timestamptz not null)"


@pytest.fixture(autouse=True)
def example(database, monkeypatch):
    """Declare the example for the time of a test, in which its table is there."""
    monkeypatch.syspath_prepend(FOLDER)
    db.execute_sql("drop table if exists pipelines")
    db.execute_sql(TABLE)
    with declaring():
        yield import_module(EXAMPLE)
    del sys.modules[EXAMPLE]
    db.execute_sql("drop table pipelines")


@pytest.fixture(autouse=True)
def restarted():
    """Open no store of an earlier test's."""
    stores.opened.cache_clear()
    yield
    stores.opened.cache_clear()
