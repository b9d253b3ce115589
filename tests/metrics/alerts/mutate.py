"""Spoil the alert rules one place at a time, and see which spoilt rule the unit tests let through.

`python -m tests.metrics.alerts.mutate [--jobs 2] [ALERT ...]` prints the survivors.  It ends with status 1 if less than nine
mutants of ten are killed, or if one survives of a rule that stands for a document's row.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.harness.rules import RULES, UNIT_TESTS, Rule, alerts_of, cases, cut, write

LEAST = 0.9

_TOKEN = re.compile(
    r"""(?P<matcher>(?<=[{,])\s*\w+\s*(?:=~|!~|!=|=)\s*"[^"]*",?)
      | (?P<string>"[^"]*")
      | (?P<range>\[\w+(?::\w+)?\])
      | (?P<word>[A-Za-z_][A-Za-z_0-9:]*)
      | (?P<number>\d+(?:\.\d+)?)
      | (?P<operator>==|!=|>=|<=|[<>+*/-])""",
    re.VERBOSE,
)
_OPERATORS = {
    ">": ["<", ">="],
    "<": [">", "<="],
    ">=": ["<", ">"],
    "<=": [">", "<"],
    "==": ["!="],
    "!=": ["=="],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
}
_WORDS = {
    "and": ["or", "unless"],
    "or": ["and", "unless"],
    "unless": ["and", "or"],
    "max": ["min"],
    "min": ["max"],
    "sum": ["max"],
    "min_over_time": ["max_over_time"],
    "clamp_min": ["clamp_max"],
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Mutant(NamedTuple):
    """A rule with one place spoilt; *change* says which and how."""

    rule: Rule
    change: str


def alternatives(rule: Rule) -> Iterator[Mutant]:
    """Spoil the rule in every way we know."""
    expr = rule["expr"]
    spoilt: list[tuple[str, dict[str, Any]]] = []
    if "alert" in rule:
        spoilt += [("never fires", {"expr": "vector(1) == 0"}), ("always fires", {"expr": "vector(1)"})]
    for token in _TOKEN.finditer(expr):
        for text in _replacements(token):
            line = expr.count("\n", 0, token.start()) + 1
            change = f"line {line}: {token[0].strip()} becomes {text or 'nothing'}"
            spoilt.append((change, {"expr": expr[: token.start()] + text + expr[token.end() :]}))
    if "alert" in rule:
        length = _seconds(rule.get("for", "0s"))
        lengths = [2 * length, length // 2, 0] if length else [300]
        spoilt += [(f"for becomes {other}s", {"for": f"{other}s"}) for other in lengths]
        if "keep_firing_for" in rule:
            kept = _seconds(rule["keep_firing_for"])
            spoilt += [
                (f"keep_firing_for becomes {n}s", {"keep_firing_for": f"{n}s"}) for n in (2 * kept, kept // 2, 0)
            ]
        severity = "warning" if rule["labels"]["severity"] != "warning" else "critical"
        spoilt.append((f"severity becomes {severity}", {"labels": {**rule["labels"], "severity": severity}}))
    for change, fields in spoilt:
        yield Mutant({**copy.deepcopy(rule), **fields}, change)


def _replacements(token: re.Match[str]) -> list[str]:
    text = token[0]
    match token.lastgroup:
        case "matcher":
            return [""]
        case "range":
            length = _seconds(text[1:-1])
            return [f"[{2 * length}s]", f"[{length // 2}s]"]
        case "word":
            return _WORDS.get(text, [])
        case "number":
            value = float(text)
            return [f"{2 * value:g}", f"{value / 2:g}"] if value else ["1"]
        case "operator":
            return _OPERATORS[text]
        case _:
            return []


def _seconds(length: str) -> int:
    return int(length[:-1]) * _UNITS[length[-1]]


def passes(folder: Path, original: Rule, spoilt: Rule | None = None) -> bool:
    """Say whether the tests of a rule's alerts pass, perhaps with the rule exchanged for another."""
    alerts = alerts_of(original)
    tests = []
    for case in (case for file in UNIT_TESTS for case in cases(file)):
        checks = [check for check in case["alert_rule_test"] if check["alertname"] in alerts]
        if checks:
            tests.append({**case, "alert_rule_test": checks})
    file = write(folder, cut(alerts, original, spoilt or original), tests)
    return subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, check=False).returncode == 0


def main() -> int:
    """Spoil, test and report."""
    parser = argparse.ArgumentParser(description="Spoil the alert rules, and see whether the tests notice.")
    parser.add_argument("alerts", nargs="*", help="only these alerts or recording rules")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    arguments = parser.parse_args()
    rules = [rule for rule in RULES if not arguments.alerts or _name(rule) in arguments.alerts]
    mutants = [(rule, mutant) for rule in rules for mutant in alternatives(rule)]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number, rule in enumerate(rules):
            if not passes(Path(folder) / f"sound-{number}", rule):
                sys.stdout.write(f"{_name(rule)}: its tests fail before anything is spoilt\n")
                return 1

        def survives(index: int) -> bool:
            rule, mutant = mutants[index]
            return passes(Path(folder) / str(index), rule, mutant.rule)

        survived = [mutants[index] for index, alive in enumerate(pool.map(survives, range(len(mutants)))) if alive]
    rows = 0
    for rule, mutant in survived:
        row = "document" in rule.get("annotations", {})
        rows += row
        sys.stdout.write(f"survived  {_name(rule)}: {mutant.change}{' (a row of a document)' if row else ''}\n")
    killed = len(mutants) - len(survived)
    rate = killed / len(mutants)
    sys.stdout.write(f"{len(mutants)} made, {killed} killed ({rate:.1%}), {len(survived)} survived\n")
    return int(rate < LEAST or rows > 0)


def _name(rule: Rule) -> str:
    return str(rule.get("alert") or rule["record"])


if __name__ == "__main__":
    sys.exit(main())
