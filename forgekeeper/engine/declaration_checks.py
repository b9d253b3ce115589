"""Checks of a declaration: each mistake is an error at import, with the correction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any

from forgekeeper.api.answers import Mistake
from forgekeeper.platform.settings.cron import BadCron, parse_schedule

BATCH_NAME_PATTERN = re.compile("[a-z][a-z0-9_]{0,62}")
"""Names of batches are names of settings and labels of metrics; PostgreSQL's names have 63 bytes."""
QUEUE_NAME_PATTERN = re.compile("[a-zA-Z_][a-zA-Z0-9._-]*")
"""Names of queues, as Dramatiq accepts them."""


def require_declarable(function: Callable[..., Any], facts: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise `Mistake` if a *function* cannot be declared by the *facts*.

    Each fact has to be in *options*.
    """
    name = function.__name__
    _require_function(name, function)
    _require_options(name, facts, options)
    _require_times(name, facts["budget"], facts.get("time_limit"))
    if "cron" in facts:
        _require_schedule(name, facts["cron"])
    if "queue" in facts and not (isinstance(facts["queue"], str) and QUEUE_NAME_PATTERN.fullmatch(facts["queue"])):
        raise Mistake(f"{name}: queue= has to be a name of letters, digits, `.`, `_` and `-`, not {facts['queue']!r}")


def _require_function(name: str, function: Callable[..., Any]) -> None:
    if not BATCH_NAME_PATTERN.fullmatch(name):
        raise Mistake(f"{name}: settings and metrics use this name; write at most 63 lowercase letters, digits and `_`")
    if not (function.__doc__ or "").strip():
        raise Mistake(f"{name}: write a docstring; its first sentence describes the batch to operators")
    if not signature(function).parameters:
        raise Mistake(f"{name}: the engine passes the time; write def {name}(now)")


def _require_options(name: str, facts: Mapping[str, Any], options: Iterable[str]) -> None:
    known = sorted({*options, "cron", "budget", "queue", "child_per"})
    for option in facts:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            meant = f"did you mean {close[0]}=?" if close else f"the options are {', '.join(known)}"
            raise Mistake(f"{name}: there is no option {option}=; {meant}")


def _require_times(name: str, budget: object, time_limit: object) -> None:
    if not isinstance(budget, timedelta) or budget <= timedelta(0):
        raise Mistake(f"{name}: budget= has to be a positive timedelta, such as timedelta(minutes=1), not {budget!r}")
    if time_limit is not None and not (isinstance(time_limit, timedelta) and time_limit >= budget):
        raise Mistake(f"{name}: time_limit= has to be a timedelta of at least the budget, not {time_limit!r}")


def _require_schedule(name: str, cron: object) -> None:
    if not isinstance(cron, str):
        raise Mistake(f"{name}: cron= has to be text, such as '*/10 * * * *', not {cron!r}")
    try:
        parse_schedule(cron)
    except BadCron as error:
        raise Mistake(f"{name}: cron= is wrong: {error}") from None
