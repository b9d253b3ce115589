"""The dashboards: they are what the code writes, say what they show, and rest on the catalogue and the rules."""

import json
import re
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from metrics.dashboards.limits import NoLimit, documented, limit
from metrics.dashboards.written import FOLDER, written
from tests.harness.catalogue import METRICS
from tests.harness.every import every

from .reading import (
    ALERTS,
    BOARDS,
    CHOICES,
    EVERY_PANEL,
    QUERIES,
    ROOT,
    RULES,
    family,
    panels,
    queries,
    selectors,
)

RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OF_PROMETHEUS = {
    "up": {"job": {"forgekeeper-worker", "forgekeeper-scheduler", "forgekeeper-exporter"}, "instance": None},
    "ALERTS": {
        "alertname": {rule["alert"] for rule in ALERTS},
        "alertstate": {"pending", "firing"},
        "severity": {rule["labels"]["severity"] for rule in ALERTS},
        "team": {rule["labels"]["team"] for rule in ALERTS},
        "batch": set(CHOICES),
        "queue_name": None,
        "instance": None,
    },
}
UNITS = {"short", "s", "percentunit", "opm", "cps", "bool_yes_no", "bool_on_off"}
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"

every_board = every("board", BOARDS)
every_panel = every("board, panel", EVERY_PANEL, name=lambda row: f"{row[0]}: {row[1]['title']}")
every_query = every("asked", QUERIES)


def labels_of(name):
    """Name the labels of a series, each with its values, None where they are not known beforehand."""
    if name in OF_PROMETHEUS:
        return OF_PROMETHEUS[name]
    if name in RECORDED:
        return {"batch": set(CHOICES)}
    metric = METRICS[family(name)]
    edges = {"le": None} if name.endswith("_bucket") else {}
    return {**metric.values, **edges, "job": OF_PROMETHEUS["up"]["job"], "instance": None}


def test_the_files_are_what_the_code_writes():
    files = {file: file.read_text() for file in FOLDER.iterdir()}

    assert files == written(), "run: make dashboards"


@every_board
def test_grafana_s_own_types_know_everything_in_a_dashboard(board):
    register_default_plugins()

    read = Dashboard.from_json(BOARDS[board])

    assert json.loads(JSONEncoder().encode(read)) == BOARDS[board]


@every_board
def test_a_dashboard_is_named_as_its_file_and_nobody_edits_it_in_the_browser(board):
    assert BOARDS[board]["uid"] == board
    assert BOARDS[board]["editable"] is False
    assert BOARDS[board]["tags"] == ["forgekeeper"]


@every_board
def test_no_two_panels_have_one_number_or_one_title(board):
    rows = [panel for panel in BOARDS[board]["panels"] if panel["type"] == "row"]
    numbers = [panel["id"] for panel in (*rows, *panels(board))]
    titles = [panel["title"] for panel in panels(board)]

    assert len(set(numbers)) == len(numbers)
    assert len(set(titles)) == len(titles)


@every_board
def test_panels_lie_side_by_side_and_fill_their_row(board):
    taken = {}
    for panel in panels(board):
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]

    assert {x for x, _ in taken} == set(range(24))
    assert {y: sum(other == y for _, other in taken) for _, y in taken} == {y: 24 for _, y in taken}


@every_panel
def test_a_panel_says_what_it_shows_in_which_unit(board, panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["targets"]


@every_panel
def test_a_panel_asks_each_query_once_under_a_letter_of_its_own(board, panel):
    letters = [target["refId"] for target in panel["targets"]]
    asked = [target["expr"] for target in panel["targets"]]

    assert len(set(letters)) == len(letters)
    assert len(set(asked)) == len(asked)


def sources(part):
    """List all data sources in a part of a dashboard."""
    if isinstance(part, dict):
        if "datasource" in part:
            yield part["datasource"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from sources(inner)


@every_board
def test_the_reader_chooses_the_data_source(board):
    found = list(sources(BOARDS[board]))
    (variable,) = [one for one in BOARDS[board]["templating"]["list"] if one["type"] == "datasource"]

    assert found
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)
    assert (variable["name"], variable["query"]) == ("datasource", "prometheus")
    assert all(target["datasource"] for panel in panels(board) for target in panel["targets"])


def test_the_batch_is_one_of_the_catalogue():
    (variable,) = [one for one in BOARDS["forgekeeper-batch"]["templating"]["list"] if one["name"] == "batch"]

    assert [option["value"] for option in variable["options"]] == CHOICES
    assert variable["query"] == ",".join(CHOICES)
    assert variable["allowCustomValue"] is False


@every_board
def test_a_dashboard_uses_the_variables_that_it_has(board):
    has = {one["name"] for one in BOARDS[board]["templating"]["list"]} - {"datasource"}

    used = {name for asked in queries(board) for name in re.findall(r"\$(?!__)(\w+)", asked.expr)}

    assert used == has


@every_query
def test_a_query_asks_for_what_the_catalogue_and_the_rules_name(asked):
    named = [name for name, _ in selectors(asked.expr)]

    assert named
    assert {name for name in named if family(name) not in METRICS} - RECORDED - OF_PROMETHEUS.keys() == set()
    assert {name for name in named if name in METRICS and METRICS[name].type == "histogram"} == set()


@every_query
def test_a_query_asks_for_labels_and_values_that_exist(asked):
    for name, matchers in selectors(asked.expr):
        for label, operator, value in matchers:
            known = labels_of(name)[label]
            wanted = {value} - {"$batch"} if operator in {"=", "!="} else set(value.split("|"))
            assert known is None or wanted <= set(known), f"{name} has no {label}{operator}{value}"


@every_query
def test_a_query_keeps_labels_that_its_metrics_have_and_is_named_by_labels_that_it_keeps(asked):
    known = {label for name, _ in selectors(asked.expr) for label in labels_of(name)}
    kept = {label for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", asked.expr) for label in re.split(r",\s*", by)}
    if not re.search(r"\b(sum|max|min|count)( by)? ?\(", asked.expr):
        kept |= known

    assert kept <= known
    assert set(re.findall(r"{{(\w+)}}", asked.legend)) <= kept


@every_query
def test_a_counter_is_shown_by_its_growth_over_a_span_that_fits(asked):
    spans = {"$__range", "1h"} if asked.now else {"$__rate_interval", "1h", "2m"}
    counted = re.sub(r"unless on \([^)]*\) \w+", "", asked.expr)  # whether there is one, not how much

    grown = re.findall(r"\b(?:rate|increase|resets)\((\w+)", counted)

    assert set(re.findall(r"\[([^\]]*)\]", asked.expr)) <= spans
    assert re.findall(r"\bforgekeeper_\w+(?:_total|_bucket)\b", counted) == grown


@every_query
def test_a_ratio_that_a_rule_records_is_asked_of_the_record(asked):
    assert not re.search(r"run_failures_total.* / .*runs_total", asked.expr)


def test_every_metric_is_on_a_dashboard():
    shown = {family(name) for asked in QUERIES for name, _ in selectors(asked.expr)}

    assert METRICS.keys() - shown == {"forgekeeper_registered_timestamp_seconds"}  # it only bounds a rule


@every("rule", [rule for rule in ALERTS if "dashboard_url" in rule["annotations"]], name=lambda rule: rule["alert"])
def test_an_alert_leads_to_a_dashboard_that_shows_what_it_rests_on(rule):
    address = urlsplit(rule["annotations"]["dashboard_url"])
    board = address.path.removeprefix("/d/")
    shown = {family(name) for asked in queries(board) for name, _ in selectors(asked.expr)}
    known = {f"var-{one['name']}" for one in BOARDS[board]["templating"]["list"]}
    given = dict(parse_qsl(address.query))

    assert given.keys() <= known
    assert given.get("var-batch", "{{ $labels.batch }}") in {"{{ $labels.batch }}", *CHOICES}
    assert ("var-batch" in given) == (board == "forgekeeper-batch")
    bounds = {"forgekeeper_registered_timestamp_seconds"}
    if rule["alert"] == "BatchNotSucceeded":
        # An exporter that is blind, and clocks that are apart, have alerts of their own.
        bounds |= {"forgekeeper_exporter_collector_success", "forgekeeper_clock_offset_seconds"}
    rests = {family(name) for name, _ in selectors(rule["expr"])}
    assert rests - bounds <= shown


def test_the_lines_are_the_rules_and_the_rules_are_what_is_counted():
    piles = {limit("UserStatusCleanupBacklogHigh"), limit("PendingDirectUploadsAccumulating")}
    failures = {
        "stale_direct_uploads": limit("StaleDirectUploadCleanupFailing"),
        "expired_job_artifacts": limit("ArtifactBulkDeleteSchedulerFailing"),
    }

    assert piles == set(documented("backlog").values())
    assert failures == documented("consecutive_failures")
    assert limit("BatchErrorBudgetBurn", window="6h") == 0.06


def test_a_line_of_a_rule_that_has_no_number_is_refused():
    with pytest.raises(NoLimit, match="Watchdog"):
        limit("Watchdog")


def test_the_page_of_dashboards_tells_of_every_row():
    told = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "dashboards.md").read_text(), re.MULTILINE)

    rows = [
        panel["title"]
        for board in ("forgekeeper-overview", "forgekeeper-batch")
        for panel in BOARDS[board]["panels"]
        if panel["type"] == "row"
    ]

    assert told == rows


def test_grafana_is_told_where_the_files_are_and_to_change_nothing():
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "forgekeeper.yml").read_text())["providers"]

    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    assert provider["disableDeletion"] is True
    assert provider["options"]["path"].endswith(str(FOLDER.relative_to(ROOT)))


def test_the_data_source_has_a_name_that_stays_and_the_scrapes_interval():
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "forgekeeper.yml").read_text())["datasources"]
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["global"]["scrape_interval"]

    assert (source["type"], source["uid"]) == ("prometheus", "forgekeeper")
    assert source["jsonData"]["timeInterval"] == scraped
