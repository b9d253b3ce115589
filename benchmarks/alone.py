"""A run of a batch in this process, without a worker."""

from __future__ import annotations

import gc
from time import monotonic
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.engine.attempt import Runner
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.settings import Settings


def run(batch: str, settings: Settings) -> tuple[float, dict[str, Any]]:
    """Execute a run of a *batch* without children; return its seconds and its result."""
    started = JobRun.start_here(batch, by=process_identity())
    assert started is not None, f"a run of {batch} is open already"
    gc.freeze()  # as a worker process does
    runner = Runner(settings, lambda *_sent: None)  # type: ignore[arg-type]  # it has no children
    began = monotonic()
    with runner.create_attempt(BATCHES[batch], started) as attempt:
        attempt.work_if_allowed()
    seconds = monotonic() - began
    runner.stop()
    assert attempt.error is None, attempt.error
    return seconds, attempt.result_fields()
