"""What a batch has of stores, repositories and Redis reads only: what would delete is refused, and the batch is named."""

import time
from datetime import timedelta

import pytest

from forgekeeper import batch
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database.writes import WritesByItself
from forgekeeper.storage import git_refs, stores
from tests.harness.git_samples import Bare, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import recorded
from tests.harness.settings import settings_with

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def places(tmp_path):
    """Settings with a store that has an object, and a repository that has a ref."""
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ".forgekeeper-root").write_text(f"installation: {INSTALLATION}\n")
    (folder / "kept").touch()
    root = put_root(tmp_path / "repositories")
    Bare(root).packed("refs/mr/1")
    stores.opened.cache_clear()
    yield {"object_stores": {"artifacts": f"file://{folder}"}, "repositories_root": root}
    stores.opened.cache_clear()
    BATCHES.pop("pull_weeds", None)


def run(work, places):
    """Let a batch do that; raise what becomes of it."""

    def pull_weeds(_now):
        """Pull what should not grow here."""
        work(stores.at("artifacts", settings_with(**places)))
        return []

    recorded(batch(cron="off", budget=timedelta(days=1), records=())(pull_weeds), settings_with(**places))


def refused(work, places):
    with pytest.raises(WritesByItself, match=r"^pull_weeds writes by itself, .*: return Rows, Items or Children"):
        run(work, places)


def test_a_store_deletes_nothing_for_a_batch(places):
    refused(lambda store: store.delete(["kept"]), places)

    assert stores.at("artifacts", settings_with(**places)).present(["kept"]) == {"kept": True}


def test_git_deletes_no_ref_for_a_batch(places):
    doomed = git_refs.Doomed("refs/mr/1", None)
    where = places["repositories_root"], "group/project.git", [doomed]

    refused(lambda _store: git_refs.delete(*where, until=time.monotonic() + 60), places)

    assert git_refs.preview(*where, until=time.monotonic() + 60)[doomed].state == "deleted"


def in_a_pipeline(_store):
    with client.pipeline() as pipe:
        pipe.delete("kept").execute()


@pytest.mark.parametrize(
    "work", [lambda _store: client.delete("kept"), in_a_pipeline, lambda _store: client.eval("return 1", 0)]
)
def test_redis_changes_nothing_for_a_batch(places, work):
    client.set("kept", 1)

    refused(work, places)

    assert client.get("kept") == b"1"


def test_what_a_batch_reads_is_answered(places):
    found = []

    run(lambda store: found.append((client.exists("none"), store.present(["kept"]))), places)

    assert found == [(0, {"kept": True})]
