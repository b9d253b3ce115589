"""First page: problems, batches, acts of people today, and servers and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.cli import audit, status
from forgekeeper.cli.amounts import COMPARED_DAYS, UNUSUAL_FACTOR
from forgekeeper.cli.console import server_states
from forgekeeper.cli.console.audit import START_OF_DAY
from forgekeeper.cli.console.backlogs import BACKLOG_HISTORY
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.problems import STATES_BY_URGENCY, ProblemLine, list_problems
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import read_time
from forgekeeper.ledger.job_runs import JobRun

MAX_SHOWN_TICKS, MAX_SHOWN_ACTS = 60, 5
"""Maximum ticks of a batch, and maximum acts of people, on the page."""
FIRST_STEPS = {
    "error": (
        TranslatableText("Servers and places"),
        TranslatableText("all answer, and belong to this installation"),
    ),
    "blocked": (TranslatableText("Data"), TranslatableText("every batch finds its tables")),
    "unserved": (
        TranslatableText("Processes"),
        TranslatableText("a scheduler is running, and each queue has a worker"),
    ),
}
"""First steps of a new installation: title and aim, by the state of the problems that they solve."""

BatchFigures = Mapping[str, Any]


@page("/", "overview.html", TranslatableText("Now"))
def show_overview(request: PageRequest) -> dict[str, Any]:
    """Show problems, batches, acts of people today, and servers and places.

    A new installation, which has released no batch yet, shows the first steps instead of the problems that they solve.
    """
    settings, found = request.settings, status.gather_facts(request.settings)
    places = server_states.list_states(settings, found["redis"]["trouble"])
    problems = list_problems(found, places)
    unreleased = [one for one in problems if one.remedy == "new"]
    is_new = len(unreleased) == len(found["amounts"]) > 0
    hidden = [one for one in problems if is_new and (one in unreleased or one.state in FIRST_STEPS)]
    acts = lookup.list_acts(read_time(START_OF_DAY, found["at"], ahead=False), limit=MAX_SHOWN_ACTS + 1)
    return found | {
        "problems": [one for one in problems if one not in hidden],
        "steps": [
            (*step, [one for one in hidden if one.state == state]) for state, step in FIRST_STEPS.items() if is_new
        ],
        "unreleased": unreleased,
        "rule": {"times": UNUSUAL_FACTOR, "days": COMPARED_DAYS, "least": settings.breaker_least},
        "freed": status.format_freed_bytes(found["batches"]),
        "places": places,
        "acts": [audit.table_row(act) for act in acts[:MAX_SHOWN_ACTS]],
        "more_acts": len(acts) > MAX_SHOWN_ACTS,
        "rows": {name: _batch_row(name, one, problems) for name, one in found["batches"].items()},
    }


def _rank_state(state: str) -> tuple[bool, int]:
    return state == "unusual", STATES_BY_URGENCY.index(state)


def _batch_row(name: str, one: BatchFigures, problems: Sequence[ProblemLine]) -> dict[str, Any]:
    """Return additional facts for the table of batches, beside the facts of `status`."""
    states = [problem.state for problem in problems if name in problem.batches]
    running = one["open"] and one["open"]["state"] == "started"
    tick_columns = (JobRun.id, JobRun.tick, JobRun.state, JobRun.reason)
    return {
        # "unusual" ranks last: the number of deletions says least about whether the batch runs.
        "light": min(states, key=_rank_state, default="running" if running else "ok"),
        "flag": BATCHES[name].flag,
        "objective": BATCHES[name].shortest_objective,
        "last": one["last"] and status.describe_last_run(one),
        "backlog": BACKLOG_HISTORY.chart_points(name),
        "ticks": list(JobRun.select_newest_first(name).select(*tick_columns).limit(MAX_SHOWN_TICKS))[::-1],
    }
