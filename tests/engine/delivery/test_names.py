"""Queues have the names that Dramatiq gives them."""

import pytest
from dramatiq import common

from forgekeeper.delivery import keys


@pytest.mark.parametrize("queue", ["cron", "cron.DQ", "cron.XQ", "a.DQ.b", ".DQ"])
def test_a_queue_is_called_as_dramatiq_calls_it(queue):
    ours = (keys.q_name(queue), keys.dq_name(queue))

    assert ours == (common.q_name(queue), common.dq_name(queue))
