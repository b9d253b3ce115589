"""The alert rules: whom they tell, what they rest on; promtool and amtool have their say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.harness.catalogue import METRICS
from tests.harness.every import every
from tests.harness.rules import RULES, RULES_FILE, UNIT_TESTS, cases, write_tests_by_alert
from tests.harness.thorough import select_rows, whole_only

from .pages import ran

ROOT = Path(__file__).parents[2]
ALERTS = [rule for rule in RULES if "alert" in rule]
ALERTMANAGER = ROOT / "deploy" / "alertmanager.yml"
NAMES = sorted({rule["alert"] for rule in ALERTS})

# 監視・アラート of the five documents: document, row, threshold, and who is told.
ROWS = [
    ("48", "処理時間", "60秒", "system-admins"),
    ("48", "残存クリーンアップ対象数", "10000件超過", "system-admins"),
    ("58", "エラー件数", "Sidekiq失敗キュー", "operations"),
    ("100", "処理時間", "250秒超過（タイムアウト）", "operations"),  # noqa: RUF001
    ("100", "エラー件数", "連続失敗", "operations"),
    ("100", "ペンディングエントリ蓄積", "大量蓄積", "operations"),
    ("65", "停滞インポート件数", "設定なし（ログ監視）", "log-monitoring"),  # noqa: RUF001
    ("65", "エラー件数", "設定なし（Sentry/ErrorTracking）", "error-tracking"),  # noqa: RUF001
    ("11", "処理時間", "60秒", "operations"),
    ("11", "エラー件数", "連続3回失敗", "operations"),
]


CHECKS = {
    "rules": ("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES_FILE),
    "prometheus": ("promtool", "check", "config", "--lint=all", "--lint-fatal", ROOT / "deploy" / "prometheus.yml"),
    "alertmanager": ("amtool", "check-config", ALERTMANAGER),
}


@pytest.mark.parametrize("command", CHECKS.values(), ids=CHECKS)
def test_the_rules_and_the_configurations_are_sound(command):
    status, said = ran(*command)

    assert status == 0, said


@pytest.mark.parametrize("file", select_rows(UNIT_TESTS), ids=lambda file: file.stem)
def test_the_rules_fire_and_stay_silent_where_they_should(file, tmp_path):
    status, said = ran("promtool", "test", "rules", *write_tests_by_alert(tmp_path, file))

    assert status == 0, said


@whole_only
def test_every_alert_is_shown_to_fire_and_to_stay_silent():
    shown = {name: set() for name in NAMES}
    for file in UNIT_TESTS:
        for case in cases(file):
            for check in case["alert_rule_test"]:
                shown[check["alertname"]].add(bool(check.get("exp_alerts")))

    assert shown == {name: {True} if name == "Watchdog" else {True, False} for name in NAMES}


@every("rule", ALERTS, name=lambda rule: rule["alert"])
def test_every_alert_says_whom_it_tells_and_what(rule):
    labels, notes = rule["labels"], rule["annotations"]

    assert labels["severity"] in {"critical", "warning", "info", "none"}
    assert labels["team"] in {"operations", "system-admins", "log-monitoring", "error-tracking"}
    assert notes["summary"].endswith(".")
    assert "$value" in notes["description"]
    assert rule["alert"] == "Watchdog" or notes["dashboard_url"].startswith("https://grafana.example/d/forgekeeper-")


@every("rule", ALERTS, name=lambda rule: rule["alert"])
def test_a_text_names_no_label_that_the_rule_does_not_keep(rule):
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = {label for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in re.split(r",\s*", by)}
    if "by (" not in rule["expr"] and not re.search(r"\b(absent|sum|max|min)\b", rule["expr"]):
        kept |= {"job", "instance"}  # nothing is aggregated away

    assert named <= kept | set(rule["labels"])


@every("document, row, threshold, team", ROWS)
def test_every_row_of_the_documents_has_its_rule(document, row, threshold, team):
    wanted = f"バッチ設計書 {document} 監視・アラート: {row} {threshold}"

    rules = [rule for rule in ALERTS if rule["annotations"].get("document") == wanted]

    assert [rule["labels"]["team"] for rule in rules] == [team]
    assert sum("document" in rule["annotations"] for rule in ALERTS) == len(ROWS)


def test_the_rules_ask_for_metrics_labels_and_values_that_exist():
    for rule in RULES:
        for name, matchers in re.findall(r"\b(forgekeeper_\w+)(?:\s*\{([^}]*)\})?", rule["expr"]):
            known = METRICS[re.sub(r"_(bucket|sum|count)$", "", name)].values
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
                for wanted in value.split("|"):
                    exists = label == "le" or known[label] is None or wanted in known[label]
                    assert exists, f"{rule['alert']}: {name} has no {label}{operator}{wanted}"


def test_prometheus_scrapes_the_jobs_that_the_rules_ask_for_with_their_installation():
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())

    groups = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}

    ports = {"worker": (9191, 9194), "scheduler": (9192,), "exporter": (9193,)}
    targets = {name: [f"127.0.0.1:{port}" for port in those] for name, those in ports.items()}
    assert groups == {
        f"forgekeeper-{name}": [{"targets": those, "labels": {"installation": "production"}}]
        for name, those in targets.items()
    }


def receivers(labels):
    """Name who is told of an alert with these labels, after the routes of the example."""
    team, severity = labels["team"], labels["severity"]
    if severity == "none":
        return "watchdog"
    named = "operations" if team == "operations" else team
    return f"pager,{named}" if severity == "critical" else named


@every("rule", ALERTS, name=lambda rule: rule["alert"])
def test_every_alert_reaches_its_people(rule):
    labels = [f"{name}={value}" for name, value in {"alertname": rule["alert"], **rule["labels"]}.items()]

    status, said = ran(
        *("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}"),
        f"--verify.receivers={receivers(rule['labels'])}",
        *labels,
    )

    assert status == 0, said


def test_what_inhibits_and_is_inhibited_exists():
    config = yaml.safe_load(ALERTMANAGER.read_text())

    matchers = [
        matcher
        for rule in config["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        if matcher.startswith("alertname")
    ]
    named = {name for matcher in matchers for name in matcher.split('"')[1].split("|")}

    assert named <= set(NAMES)
    # No installation holds back what another has to say.
    assert all("installation" in rule["equal"] for rule in config["inhibit_rules"])


@every("rule", [rule for rule in RULES if rule.get("alert") != "Watchdog"], name=lambda rule: rule.get("alert"))
def test_no_rule_mixes_installations(rule):
    kept = re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", rule["expr"])
    bare = re.findall(r"\b(?:sum|max|min|count|avg|group)\s*\(", re.sub(r"absent\(group\(", "", rule["expr"]))

    assert bare == []
    assert all(labels.split(", ")[0] == "installation" for labels in kept)
