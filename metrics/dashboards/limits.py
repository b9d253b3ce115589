"""The numbers at which lines are drawn: read where they count, in the alert rules and in the code that measures."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from forgekeeper.batches import all_declared

RULES = Path(__file__).parent.parent / "alerts.yml"
COMPARISON = re.compile(r"[<>]=?\s*(\d+(?:\.\d+)?)(?:\s*\*\s*(\d+(?:\.\d+)?))?")


def documented(threshold: str) -> dict[str, float]:
    """Return the documents' limits of that name, by batch."""
    limits = {one.name: one.limit(threshold) for one in all_declared()}
    return {name: limit.above for name, limit in limits.items() if limit is not None}


class NoLimit(Exception):
    """No such rule compares with a number; the message names it."""


@cache
def alerts() -> list[dict[str, Any]]:
    """List the alert rules, in their order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def limit(alert: str, **labels: str) -> float:
    """Return the first number that the rule compares with; *labels* choose among rules of one name."""
    for rule in alerts():
        found = COMPARISON.search(rule["expr"])
        if rule["alert"] == alert and labels.items() <= rule["labels"].items() and found:
            return float(found[1]) * float(found[2] or 1)
    raise NoLimit(alert)


def alert_names() -> list[str]:
    """Name the alerts that tell of trouble: all but the watchdog, which always fires."""
    return sorted({rule["alert"] for rule in alerts() if rule["labels"]["severity"] != "none"})


def runbook(placeholder: str) -> str:
    """Return where the list of alerts links to a runbook; *placeholder* stands for the alert's name."""
    url: str = alerts()[0]["annotations"]["runbook_url"]
    return f"{url.partition('/runbooks/')[0]}/alerts.md#{placeholder}"
