"""Batches and children are Dramatiq's actors; a batch is sent through the ledger."""

import dramatiq
import pytest

from forgekeeper import Children
from forgekeeper.api.batches import NotSent, all_declared
from forgekeeper.delivery.broker import broker
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from workers.git_ref_cleanup import clean_project_refs
from workers.prune import prune

pytestmark = pytest.mark.usefixtures("database")


def test_each_batch_and_child_is_an_actor_of_the_broker():
    for one in all_declared():
        assert isinstance(one, dramatiq.Actor)
        assert broker.get_actor(one.name) is one
        assert (one.actor_name, one.queue_name) == (one.name, one.queue)
        assert one.options["time_limit"] == one.time_limit.total_seconds() * 1000


def test_a_sent_batch_has_a_run_in_the_ledger():
    message = prune.send()

    run = JobRun.get(JobRun.batch == "prune")
    assert (message.message_id, message.queue_name, run.state) == (str(run.id), "cron", "enqueued")


def test_a_batch_that_is_sent_twice_has_one_run():
    assert prune.send().message_id == prune.send().message_id
    assert JobRun.select().where(JobRun.batch == "prune").count() == 1


def test_a_batch_that_is_paused_is_not_sent():
    Hold.add("prune", "pause", until=None, reason="test", by="test")

    with pytest.raises(NotSent, match="prune is paused"):
        prune.send()

    assert (JobRun.select().count(), Hold.find_state("prune")) == (0, "paused")


def test_a_batch_takes_no_arguments():
    with pytest.raises(TypeError, match="send\\(\\) has no arguments"):
        prune.send(7)


def test_children_with_different_arguments_have_different_keys():
    arguments = [("group:x", "y"), ("group", "x:y"), (7,), ("7",), (7, 8), ("7:8",), (None,), ("null",)]

    keys = [key for key, _ in Children(clean_project_refs, arguments).iterate_calls()]

    assert (len(set(keys)), keys[2]) == (len(arguments), "clean_project_refs:7")
