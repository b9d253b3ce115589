"""The dashboards rest on the catalogue and the rules, and every alert leads to one that shows it."""

import json
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.harness.catalogue import METRICS
from tests.harness.every import every
from tests.harness.rules import RULES

from .pages import ran

ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OF_PROMETHEUS = {
    "up": {"job", "instance"},
    "ALERTS": {"alertname", "alertstate", "severity", "team", "batch", "queue_name", "instance"},
}
FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
SELECTOR = re.compile(
    r"(?<![\w:$.\"])(forgekeeper_\w+|batch(?:_record:backlog\w+)?:[\w:]+|up(?=\{)|ALERTS)(?:\{([^}]*)\})?"
)
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

every_query = every("asked", QUERIES)


def labels_of(name):
    """Name the labels of a series, each with its values, None where they are not known beforehand."""
    if name in OF_PROMETHEUS:
        return dict.fromkeys(OF_PROMETHEUS[name])
    if name in RECORDED:
        return {"batch": CHOICES} | ({"record": None} if name.startswith("batch_record:") else {})
    return {**METRICS[family(name)].values, "le": None, "job": None, "instance": None}


@every("panel", [panel for board in BOARDS for panel in panels(board)], name=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_which_unit(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]


def test_prometheus_understands_every_query(tmp_path):
    given = {"$__rate_interval": "1m", "$__range": "30m", "$batch": "prune", "$alerts": "BatchPaused"}
    asked = [re.sub(r"\$\w+", lambda name: given[name[0]], asked.expr) for asked in QUERIES]
    rules = [{"record": f"query_{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    status, said = ran("promtool", "check", "rules", tmp_path / "queries.yml")

    assert status == 0, said


@every_query
def test_a_query_asks_for_metrics_labels_and_values_that_exist(asked):
    named = selectors(asked.expr)

    assert named
    for name, matchers in named:
        assert name in RECORDED or name in OF_PROMETHEUS or family(name) in METRICS, name
        for label, _operator, value in matchers:
            known = labels_of(name)[label]
            assert known is None or "$" in value or set(value.split("|")) <= set(known), f"{name}: {label}={value}"


@every_query
def test_a_query_groups_by_labels_that_its_metrics_have_and_is_named_by_those_that_it_keeps(asked):
    known = {label for name, _ in selectors(asked.expr) for label in labels_of(name)}
    kept = {label for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", asked.expr) for label in re.split(r",\s*", by)}
    if not re.search(r"\b(sum|max|min|count)( by)? ?\(", asked.expr):
        kept |= known

    assert kept <= known
    assert set(re.findall(r"{{(\w+)}}", asked.legend)) <= kept


@every_query
def test_a_counter_is_shown_by_its_growth(asked):
    counted = re.sub(r"unless on \([^)]*\) \w+", "", asked.expr)  # whether there is one, not how much

    grown = re.findall(r"\b(?:rate|increase|resets)\((\w+)", counted)

    assert re.findall(r"\bforgekeeper_\w+(?:_total|_bucket)\b", counted) == grown


def test_every_metric_is_on_a_dashboard():
    shown = {family(name) for asked in QUERIES for name, _ in selectors(asked.expr)}

    assert METRICS.keys() - shown == {"forgekeeper_registered_timestamp_seconds"}  # it only bounds a rule


def test_a_batch_that_is_declared_can_be_chosen_without_an_edit():
    chosen = variable("forgekeeper-batch", "batch")

    assert chosen["query"]["query"] == "label_values(forgekeeper_info, batch)"
    assert not [name for name in CHOICES if f'"{name}"' in json.dumps(BOARDS["forgekeeper-batch"])]


@every("board", BOARDS)
def test_firing_alerts_are_all_of_ours_but_the_watchdog(board):
    assert variable(board, "alerts")["query"].split("|") == sorted({rule["alert"] for rule in ALERTS} - {"Watchdog"})


@every("rule", [rule for rule in ALERTS if "dashboard_url" in rule["annotations"]], name=lambda rule: rule["alert"])
def test_an_alert_leads_to_a_dashboard_that_shows_what_it_rests_on(rule):
    address = urlsplit(rule["annotations"]["dashboard_url"])
    board = address.path.removeprefix("/d/")
    given = dict(parse_qsl(address.query))
    shown = {family(name) for asked in queries(board) for name, _ in selectors(asked.expr)}
    bounds = {"forgekeeper_registered_timestamp_seconds"}
    if rule["alert"] == "BatchNotSucceeded":
        # An exporter that cannot read, and clocks that are apart, have alerts of their own.
        bounds |= {"forgekeeper_exporter_collector_success", "forgekeeper_clock_offset_seconds"}

    rests = {family(name) for name, _ in selectors(rule["expr"])}
    kept = {name for name in rests if name.endswith("_since_timestamp_seconds:max")}
    # Rules keep what the exporter said last: a dashboard shows what it says now.
    rests = rests - kept | {f"forgekeeper_{name.replace(':', '_').removesuffix('_max')}" for name in kept}

    assert rests - bounds <= shown
    assert given.get("var-batch", "{{ $labels.batch }}") in {"{{ $labels.batch }}", *CHOICES}
    assert ("var-batch" in given) == (board == "forgekeeper-batch")
