"""The dashboards, as Grafana would read them: their panels and the queries that those ask."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.harness.catalogue import METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))
BOARDS = {file.stem: json.loads(file.read_text()) for file in FILES}
SELECTOR = re.compile(r"(?<![\w:$.\"])(forgekeeper_\w+|batch:[\w:]+|up(?=\{)|ALERTS)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Asked(NamedTuple):
    """A query, and where it is asked."""

    board: str
    panel: str
    expr: str
    now: bool
    legend: str

    def __str__(self):
        return f"{self.board}: {self.panel}: {self.legend}"


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
            yield Asked(board, panel["title"], target["expr"], now, target["legendFormat"])
    for annotation in BOARDS[board]["annotations"]["list"]:
        target = annotation["target"]
        yield Asked(board, annotation["name"], target["expr"], now=False, legend=target["legendFormat"])


def selectors(expr):
    """List the metrics that an expression asks for, each with its matchers: label, operator, value."""
    return [(name, MATCHER.findall(matchers)) for name, matchers in SELECTOR.findall(expr)]


def family(name):
    """Name the metric of the catalogue to which a series belongs."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def variable(board, name):
    """Return the variable of that name."""
    return next(one for one in BOARDS[board]["templating"]["list"] if one["name"] == name)


CHOICES = list(dict.fromkeys(name for metric in METRICS.values() for name in metric.values.get("batch") or ()))
"""All that the label `batch` can be."""
QUERIES = [asked for board in BOARDS for asked in queries(board)]
