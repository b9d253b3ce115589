"""First page: problems, batches, acts of people today, and servers and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.cli import audit, status
from forgekeeper.cli.amounts import DAYS, TIMES
from forgekeeper.cli.console import where
from forgekeeper.cli.console.backlogs import BACKLOGS
from forgekeeper.cli.console.pages import Asked, page
from forgekeeper.cli.console.problems import URGENCY, ProblemLine, list_problems
from forgekeeper.cli.console.recorded import TODAY
from forgekeeper.cli.not_deleted import objective
from forgekeeper.cli.terminal import read_time
from forgekeeper.ledger.job_runs import JobRun

MAX_TICKS, MAX_ACTS_SHOWN = 60, 5
"""Maximum ticks of a batch, and maximum acts of people, on the page."""
FIRST_STEPS = {
    "error": ("Servers and places", "all are there, and belong to this installation"),
    "blocked": ("Data", "every batch finds its tables"),
    "unserved": ("Processes", "a scheduler lives, and each queue has a worker"),
}
"""First steps of a new installation: title and aim, by the state of the problems that they solve."""

Facts = Mapping[str, Any]


@page("/", "overview.html", "Now")
def overview(asked: Asked) -> dict[str, Any]:
    """Show problems, batches, acts of people today, and servers and places.

    A new installation, which has released no batch yet, shows the first steps instead of the problems that they solve.
    """
    settings, found = asked.settings, status.gather(asked.settings)
    places = where.facts(settings, found["redis"]["trouble"])
    problems = list_problems(found, places)
    unreleased = [one for one in problems if one.remedy == "new"]
    is_new = len(unreleased) == len(found["amounts"]) > 0
    hidden = [one for one in problems if is_new and (one in unreleased or one.state in FIRST_STEPS)]
    acts = lookup.acts(read_time(TODAY, found["at"], ahead=False), limit=MAX_ACTS_SHOWN + 1)
    return found | {
        "problems": [one for one in problems if one not in hidden],
        "steps": [
            (*step, [one for one in hidden if one.state == state]) for state, step in FIRST_STEPS.items() if is_new
        ],
        "unreleased": unreleased,
        "rule": {"times": TIMES, "days": DAYS, "least": settings.breaker_least},
        "freed": status.write_freed(found["batches"]),
        "places": places,
        "acts": [audit.row_of(act) for act in acts[:MAX_ACTS_SHOWN]],
        "more_acts": len(acts) > MAX_ACTS_SHOWN,
        "rows": {name: _row(name, one, problems) for name, one in found["batches"].items()},
    }


def _rank(state: str) -> tuple[bool, int]:
    return state == "unusual", URGENCY.index(state)


def _row(name: str, one: Facts, problems: Sequence[ProblemLine]) -> dict[str, Any]:
    """Return additional facts for the table of batches, beside the facts of `status`."""
    states = [problem.state for problem in problems if name in problem.batches]
    running = one["open"] and one["open"]["state"] == "started"
    looked_at = (JobRun.id, JobRun.tick, JobRun.state, JobRun.reason)
    return {
        # "unusual" ranks last: the number of deletions says least about whether the batch runs.
        "light": min(states, key=_rank, default="running" if running else "ok"),
        "flag": BATCHES[name].flag,
        "objective": objective(BATCHES[name]),
        "last": one["last"] and status.ended(one),
        "left": status.estimate_time_left(one),
        "backlog": BACKLOGS.points(name),
        "ticks": list(JobRun.of(name).select(*looked_at).limit(MAX_TICKS))[::-1],
    }
