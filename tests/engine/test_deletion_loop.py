"""The loop over a source and a target that know nothing of queues and stores: limited, audited, settled."""

from datetime import timedelta

import pytest
from peewee import IntegerField, TextField
from playhouse.postgres_ext import DateTimeTZField
from structlog.testing import capture_logs

from forgekeeper import Objects, Queue, Table, batch
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.deletions import AuditItem
from forgekeeper.delivery.broker import broker, load_batches
from forgekeeper.engine import work
from forgekeeper.engine.source import KeyedSource
from forgekeeper.engine.target import DeletionResult, ItemTarget, KeptItem
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.platform.failpoints import FailpointReached
from tests.harness.audited import count_open_intents, list_audit_lines
from tests.harness.excluding import exclude
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with

FILES = 25
CHUNK = 10


class Leaf(Table):
    """A file of an operator's own, by its name."""

    name = TextField()
    due_at = DateTimeTZField(default=now)
    attempts = IntegerField(default=0)
    created_at = DateTimeTZField(default=now)


class Leaves(KeyedSource[Leaf]):
    """The files that the table names; files named kept are kept, files named lost are another worker's by then."""

    record = "leaf"
    chunk_size = CHUNK

    def __init__(self, folder):
        self.target = Folder(folder)

    def find_scope(self, _one):
        return None

    def exclusion_key(self, one):
        return None, one.name

    def find_due(self, keys):
        return {leaf.id for leaf in Leaf.select().where(Leaf.id.in_(list(keys)))}

    def item_key(self, one):
        return one.id

    def find_keys(self, page):
        return [leaf.id for leaf in self.claim_next(page)]

    def claim_next(self, page):
        found = Leaf.select().where(Leaf.id > page.after).order_by(Leaf.id).limit(page.limit)
        found = found.where(Leaf.id.not_in(list(page.without))) if page.without else found
        return list(found.where(Leaf.id.in_(list(page.only))) if page.only is not None else found)

    def find_kept(self, items):
        return {leaf: KeptItem("it says so") for leaf in items if leaf.name.startswith("kept")}

    def mark_for_deletion(self, items, kept):
        ours = [leaf for leaf in items if not leaf.name.startswith("lost")]
        return {leaf: kept.get(leaf) or AuditItem(leaf.id, leaf.name, {"name": leaf.name}) for leaf in ours}

    def find_lost(self, _items):
        return ()

    def settle(self, states):
        settled = [leaf.id for leaf, became in states.items() if became.state != "failed"]
        Leaf.delete().where(Leaf.id.in_(settled)).execute()
        return {state: sum(one.state == state for one in states.values()) for state in ("deleted", "failed")}


class Folder(ItemTarget[Leaf]):
    """A folder with the files; files named failed cannot be deleted, those named away not be looked at."""

    audit_key = "name"

    def __init__(self, folder):
        self._folder = folder

    def list_scopes(self):
        return [None]

    def find_states_after_crash(self, _scope, _until, rows):
        return ["kept" if (self._folder / row["name"]).exists() else "deleted" for row in rows]

    def find_undeletable(self, _scope, items):
        return {leaf: KeptItem("it is away") for leaf in items if leaf.name.startswith("away")}

    def delete(self, _scope, items, fence):
        assert not fence.find_lost(items)
        states = {}
        for leaf in items:
            if leaf.name.startswith("failed"):
                states[leaf] = KeptItem("no", "failed")
            else:
                (self._folder / leaf.name).unlink(missing_ok=True)
                states[leaf] = KeptItem(None, "deleted")
        return DeletionResult(states)

    def handle_error(self, _scope, error):
        raise error


@pytest.fixture
def folder(database, tmp_path):
    database.create_tables([Leaf])
    for number in range(FILES):
        (tmp_path / f"leaf-{number}").touch()
        Leaf.create(name=f"leaf-{number}")
    yield tmp_path
    database.drop_tables([Leaf])
    if BATCHES.pop("sweep_leaves", None):
        broker.actors.pop("sweep_leaves", None)


@pytest.fixture
def leaves(folder, monkeypatch):
    """A batch that deletes the files."""
    monkeypatch.setattr(work, "QueueSource", lambda _answer, _run: Leaves(folder))

    def sweep_leaves(_now):
        """Sweep leaves."""
        queue = Queue(Leaf, due_at=Leaf.due_at, attempts=Leaf.attempts, created_at=Leaf.created_at)
        return Objects(queue, location="leaves", path=Leaf.name)

    return batch(cron="off", budget=timedelta(minutes=1))(sweep_leaves)


def left(folder):
    return len(list(folder.iterdir()))


def run(leaves, **options):
    load_batches()
    return run_as_worker(leaves, settings_with(**options)).result


def test_what_is_due_goes_and_each_is_in_the_audit(leaves, folder):
    result = run(leaves)

    assert (result["deleted"], result["stopped"], left(folder), Leaf.select().count()) == (FILES, "drained", 0, 0)
    assert sorted(line["name"] for line in list_audit_lines("leaf")) == sorted(
        f"leaf-{number}" for number in range(FILES)
    )


@pytest.mark.parametrize("limit", [1, CHUNK, CHUNK + 3])
def test_a_limit_is_exact(leaves, folder, limit):
    result = run(leaves, max_per_run_sweep_leaves=limit)

    assert (result["deleted"], FILES - left(folder), FILES - Leaf.select().count()) == (limit, limit, limit)


@pytest.mark.parametrize("name", ["kept", "away"])
def test_what_stays_is_settled_and_uses_no_limit(leaves, folder, name):
    Leaf.update(name=name).where(Leaf.id <= Leaf.select(Leaf.id).order_by(Leaf.id).limit(1)).execute()

    result = run(leaves, max_per_run_sweep_leaves=FILES - 1)

    assert (result["deleted"], left(folder), Leaf.select().count()) == (FILES - 1, 1, 0)


def test_what_fails_counts_as_gone_until_somebody_knows_better(leaves):
    first = Leaf.select().order_by(Leaf.id).get()
    Leaf.update(name="failed").where(Leaf.id == first.id).execute()

    result = run(leaves, max_per_run_sweep_leaves=5)

    total = RunTotal.get(RunTotal.batch == "sweep_leaves")
    assert (result["deleted"], result["failed"], total.records, total.reserved) == (4, 1, 4, 1)


def test_what_is_another_s_by_then_stays_and_uses_no_limit(leaves, folder):
    first = Leaf.select().order_by(Leaf.id).get()
    Leaf.update(name="lost").where(Leaf.id == first.id).execute()

    result = run(leaves, max_per_run_sweep_leaves=FILES)

    total = RunTotal.get(RunTotal.batch == "sweep_leaves")
    assert (result["deleted"], total.records, total.reserved) == (FILES - 1, FILES - 1, 0)
    assert (left(folder), Leaf.select().count()) == (1, 1)


def test_an_attempt_that_died_in_between_has_used_its_chunk_and_the_next_closes_its_lines(leaves, folder):
    with pytest.raises(FailpointReached):
        run(leaves, max_per_day_sweep_leaves=CHUNK + 2, failpoints="sweep_leaves.deleted=raise")
    assert (left(folder), count_open_intents()) == (FILES - CHUNK, 1)

    result = run(leaves, max_per_day_sweep_leaves=CHUNK + 2)

    assert (result["deleted"], count_open_intents()) == (2, 0)
    assert left(folder) >= FILES - CHUNK - 2


def test_a_row_that_cannot_be_settled_is_passed_over_and_stops_no_other(leaves):
    bad = Leaf.select().order_by(Leaf.id).offset(3).get()
    db.execute_sql("create table pinned (leaf bigint references leaf)")
    db.execute_sql("insert into pinned values (%s)", (bad.id,))
    try:
        with capture_logs():
            result = run(leaves)
    finally:
        db.execute_sql("drop table pinned")

    assert (result["deleted"], [one.key for one in Quarantined.select()]) == (FILES - 1, [str(bad.id)])


def test_what_people_exclude_by_its_name_is_left_as_it_is(leaves, folder):
    exclude("pattern:leaf-1*")

    result = run(leaves)

    kept = {"leaf-1", *(f"leaf-{number}" for number in range(10, 20))}
    assert (result["deleted"], {file.name for file in folder.iterdir()}) == (FILES - len(kept), kept)
    assert {leaf.name for leaf in Leaf.select()} == kept
