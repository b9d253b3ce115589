"""What a batch has of stores, repositories and Redis reads only: what would delete is refused, and the batch is named."""

import time
from datetime import timedelta

import pytest

from forgekeeper import batch
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database.sessions import WritesByItself
from forgekeeper.storage import git_refs, stores
from tests.harness.git_samples import Bare, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import recorded
from tests.harness.settings import settings_with

REPOSITORY, DOOMED = "group/project.git", git_refs.Doomed("refs/mr/1", None)

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
    """Let a batch do that with the store and the place of the repository; raise what becomes of it."""

    def pull_weeds(_now):
        """Pull what should not grow here."""
        work(stores.at("artifacts", settings_with(**places)), places["repositories_root"])
        return []

    recorded(batch(cron="off", budget=timedelta(days=1), records=())(pull_weeds), settings_with(**places))


def in_a_pipeline(_store, _root):
    with client.pipeline() as pipe:
        pipe.delete("kept").execute()


@pytest.mark.parametrize(
    "work",
    [
        lambda store, _root: store.delete(["kept"]),
        lambda _store, root: git_refs.delete(root, REPOSITORY, [DOOMED], until=time.monotonic() + 60),
        lambda _store, _root: client.delete("kept"),
        in_a_pipeline,
        lambda _store, _root: client.eval("return 1", 0),
    ],
    ids=["object", "ref", "key", "pipeline", "script"],
)
def test_what_would_delete_is_refused_and_the_batch_is_named(places, work):
    client.set("kept", 1)

    with pytest.raises(WritesByItself, match=r"^pull_weeds writes by itself, .*: return Rows, Items or Children"):
        run(work, places)

    refs = git_refs.preview(places["repositories_root"], REPOSITORY, [DOOMED], until=time.monotonic() + 60)
    assert stores.at("artifacts", settings_with(**places)).present(["kept"]) == {"kept": True}
    assert (client.get("kept"), refs[DOOMED].state) == (b"1", "deleted")


def test_what_a_batch_reads_is_answered(places):
    found = []

    run(lambda store, _root: found.append((client.exists("none"), store.present(["kept"]))), places)

    assert found == [(0, {"kept": True})]
