"""The alert rules and their unit tests, cut down to what a test needs: promtool evaluates every rule it is given."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Rule = dict[str, Any]
Case = dict[str, Any]

ALERTS = Path(__file__).parents[1] / "metrics" / "alerts"
RULES_FILE = ALERTS.parents[2] / "metrics" / "alerts.yml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"]
RULES: list[Rule] = [rule for group in GROUPS for rule in group["rules"]]
UNIT_TESTS = sorted(ALERTS.glob("*.yml"))


def cases(file: Path) -> list[Case]:
    """Read the cases of a file of unit tests."""
    read: dict[str, Any] = yaml.safe_load(file.read_text())
    assert (set(read), read["evaluation_interval"]) == ({"rule_files", "evaluation_interval", "tests"}, "1m")
    cases: list[Case] = read["tests"]
    return cases


def list_alerts(case: Case) -> set[str]:
    """Name the alerts that a case is about, or what is recorded."""
    recorded = {check["expr"] for check in case.get("promql_expr_test", ())}
    return recorded | {check["alertname"] for check in case["alert_rule_test"]}


def alerts_of(rule: Rule) -> set[str]:
    """Name the alerts that a rule has a part in, and what it records."""
    if "alert" in rule:
        return {rule["alert"]}
    return {rule["record"]}.union(*(alerts_of(user) for user in RULES if depends_on(user, rule)))


def depends_on(user: Rule, rule: Rule) -> bool:
    """Say whether a rule asks for what another records; none asks for alerts that fire."""
    assert not re.search(r"\bALERTS", user["expr"])
    return user is not rule and "record" in rule and rule["record"] in user["expr"]


def write_tests_by_alert(folder: Path, file: Path) -> Iterator[Path]:
    """Write the cases of a file for promtool, each beside the rules that have a part in it and no others."""
    together: dict[frozenset[str], list[Case]] = {}
    for case in cases(file):
        together.setdefault(frozenset(list_alerts(case)), []).append(case)
    for alerts, those in together.items():
        groups = [{**group, "rules": [rule for rule in group["rules"] if alerts_of(rule) & alerts]} for group in GROUPS]
        place = folder / "-".join(sorted(alerts))[:200]
        place.mkdir()
        (place / "rules.yml").write_text(json.dumps({"groups": [group for group in groups if group["rules"]]}))
        tests = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": those}
        (place / "tests.yml").write_text(json.dumps(tests))
        yield place / "tests.yml"
