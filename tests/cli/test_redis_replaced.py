"""A Redis that was emptied or replaced is noticed: PostgreSQL stores which Redis has the register of uploads."""

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.acts import Act
from forgekeeper.ledger.holds import Batch
from forgekeeper.platform.connections import client
from tests.harness.stale_uploads import register
from tests.harness.thorough import whole_only

UPLOADS, STATUSES = "stale_direct_uploads", "user_status_cleanup"
LOST = "Redis lacks the register of stale_direct_uploads, last used "
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def emptied(database, main, store):
    """Let a run use Redis, and then empty Redis."""
    (store / "a").write_text("an upload that never completed")
    register("a")
    first = main("run", UPLOADS, "--json")
    assert first.status == 0, first.stderr
    client.flushdb()


@pytest.mark.usefixtures("emptied")
def test_an_emptied_redis_blocks_the_batch_that_has_its_register_there_and_no_other(main):
    blocked, other = main("run", UPLOADS, "--json"), main("run", STATUSES, "--json")

    assert (blocked.status, blocked.json["skipped"], LOST in blocked.json["blocked"]) == (3, "redis_replaced", True)
    assert (other.status, other.json["stopped"]) == (0, "drained")
    assert [level for level, message in main("check", "--json").findings("redis") if LOST in message] == ["error"]


@whole_only
@pytest.mark.usefixtures("emptied")
def test_every_command_warns_until_a_person_says_that_redis_was_replaced(main):
    main("run", UPLOADS)
    warned = main("buckets", "--json")

    main("check", "--init", "--redis-replaced", "--reason", "the disk was lost")

    assert LOST in warned.stderr
    assert main("buckets", "--json").stderr == ""
    assert main("run", UPLOADS, "--json").json["total_deleted_stale_entries"] == 0
    (act,) = Act.select().where(Act.act == "check --init --redis-replaced")
    assert (act.batch, act.reason) == (UPLOADS, "the disk was lost")


@pytest.mark.usefixtures("emptied")
def test_a_preview_of_the_batch_says_that_its_register_is_lost(main):
    assert LOST in main("run", UPLOADS, "--dry-run").stdout


def test_what_the_first_run_could_only_write_to_redis_the_next_one_records(main, store):
    client.set(BATCHES[UPLOADS].epoch_key, "of a run that was killed")

    assert main("run", UPLOADS).status == 0

    assert Batch.get_by_id(UPLOADS).redis_epoch == "of a run that was killed"


@pytest.mark.parametrize("options", [["--redis-replaced"], ["--init", "--redis-replaced"]])
def test_a_replaced_redis_is_accepted_with_a_reason_alone(main, options):
    assert main("check", *options).status == 2
