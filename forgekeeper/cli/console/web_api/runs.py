"""Endpoints of runs."""

from __future__ import annotations

from typing import Any

from forgekeeper.cli import ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.batch import TICK_STATES
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import (
    BATCH,
    CURSOR,
    LIMIT,
    Parameter,
    endpoint,
    read_cursor,
    read_limit,
)
from forgekeeper.cli.console.web_api.models import RunAnswer, RunsAnswer
from forgekeeper.cli.running import require_run
from forgekeeper.cli.terminal import read_number, wrong_use

STATE = Parameter("state", "Only runs in this state.", {"type": "string", "enum": list(TICK_STATES)})


@endpoint("/runs", RunsAnswer, query=(BATCH, STATE, LIMIT, CURSOR))
def read_runs(request: PageRequest) -> dict[str, Any]:
    """Read ticks and manual runs, newest first, as in `forgekeeper ticks BATCH --json`."""
    query, limit = request.query, read_limit(request)
    batch = batch_named(query["batch"]).name if "batch" in query else None
    if (state := query.get("state")) not in {None, *TICK_STATES}:
        wrong_use(f"there is no state {state!r}; there are: {', '.join(TICK_STATES)}")
    runs = ticks.list_runs(batch, limit=limit + 1, state=state, before=read_cursor(request))
    shown = runs[:limit]
    return ticks.tick_facts(batch, shown) | {"next": str(shown[-1].id) if len(runs) > limit else None}


@endpoint("/runs/{run}", RunAnswer)
def read_run(request: PageRequest) -> dict[str, Any]:
    """Read one run, its children and its story, as in `forgekeeper why RUN --json`."""
    return ticks.explain_run(require_run(read_number(request.path["run"], "a run")))
