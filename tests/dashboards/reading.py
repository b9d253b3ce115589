"""The committed dashboards, as Grafana would read them: their panels and the queries that those ask."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.harness.catalogue import METRICS

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
GROUPS = yaml.safe_load((ROOT / "metrics" / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
SELECTOR = re.compile(r"(?<![\w:$.\"])(forgekeeper_\w+|batch:[\w:]+|up(?=\{)|ALERTS)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Asked(NamedTuple):
    """A query, and where it is asked."""

    board: str
    panel: str
    ref: str
    expr: str
    now: bool
    legend: str

    def __str__(self):
        return f"{self.board}: {self.panel} ({self.ref})"


def panels(board):
    """List the panels, those of folded rows too; rows are none."""
    for panel in BOARDS[board]["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(board):
    """List what the panels and the annotations ask."""
    for panel in panels(board):
        for target in panel["targets"]:
            now = target.get("instant", False)
            yield Asked(board, panel["title"], target["refId"], target["expr"], now, target["legendFormat"])
    for annotation in BOARDS[board]["annotations"]["list"]:
        target = annotation["target"]
        yield Asked(
            board, annotation["name"], target["refId"], target["expr"], now=False, legend=target["legendFormat"]
        )


def selectors(expr):
    """List the metrics that an expression asks for, each with its matchers: label, operator, value."""
    # Label names stand in `by` and `on`, and none looks like a metric of ours.
    return [(name, MATCHER.findall(matchers)) for name, matchers in SELECTOR.findall(expr)]


def family(name):
    """Name the metric of the catalogue to which a series belongs."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


CHOICES = list(dict.fromkeys(name for metric in METRICS.values() for name in metric.values.get("batch") or ()))
"""All that the label `batch` can be."""
QUERIES = [asked for board in BOARDS for asked in queries(board)]
EVERY_PANEL = [(board, panel) for board in BOARDS for panel in panels(board)]
