"""The alert rules: whom they tell, what they rest on; promtool and amtool have their say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from threading import Event

import pytest
import yaml

from tests.harness.catalogue import METRICS
from tests.harness.every import every
from tests.harness.ports import free_ports
from tests.harness.rules import RULES, RULES_FILE, UNIT_TESTS, by_alert, cases

ROOT = Path(__file__).parents[2]
ALERTS = [rule for rule in RULES if "alert" in rule]
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


def found(program):
    """Find Debian's program, which .ci/run installs; elsewhere a machine without it is no reason to fail."""
    if shutil.which(program) is None:
        if "CI" in os.environ:
            pytest.fail(f"{program} is missing, and .ci/run should have installed it")
        pytest.skip(f"{program} is not installed (Debian: prometheus, prometheus-alertmanager)")
    return program


def ran(program, *arguments):
    """Run Debian's program; return its status and what it said."""
    found(program)
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_rules_are_sound():
    status, said = ran("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES_FILE)

    assert status == 0, said


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_the_rules_fire_and_stay_silent_where_they_should(file, tmp_path):
    status, said = ran("promtool", "test", "rules", *by_alert(tmp_path, file))

    assert status == 0, said


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


def test_no_rule_names_a_row_that_no_document_has():
    assert sum("document" in rule["annotations"] for rule in ALERTS) == len(ROWS)


def test_the_rules_rest_on_metrics_of_the_catalogue():
    names = set(METRICS) | {
        f"{name}_{end}"
        for name, metric in METRICS.items()
        if metric.type == "histogram"
        for end in ("bucket", "sum", "count")
    }

    asked = {name for rule in RULES for name in re.findall(r"\bforgekeeper_\w+", rule["expr"])}

    assert asked - names == set()


def test_the_rules_ask_for_labels_and_values_that_exist():
    for rule in RULES:
        for name, matchers in re.findall(r"\b(forgekeeper_\w+)\s*\{([^}]*)\}", rule["expr"]):
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
                known = METRICS[name].values[label]
                for wanted in value.split("|"):
                    assert known is None or wanted in known, f"{rule['alert']}: {name} has no {label}{operator}{wanted}"


def test_the_configuration_of_prometheus_is_sound():
    status, said = ran("promtool", "check", "config", "--lint=all", "--lint-fatal", ROOT / "deploy" / "prometheus.yml")

    assert status == 0, said


def test_prometheus_scrapes_the_jobs_that_the_rules_ask_for():
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())

    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}

    assert targets == {
        "forgekeeper-worker": ["127.0.0.1:9191"],
        "forgekeeper-scheduler": ["127.0.0.1:9192"],
        "forgekeeper-exporter": ["127.0.0.1:9193"],
    }


ALERTMANAGER = ROOT / "deploy" / "alertmanager.yml"


def receivers(labels):
    """Name who is told of an alert with these labels, after the routes of the example."""
    team, severity = labels["team"], labels["severity"]
    if severity == "none":
        return "watchdog"
    named = "operations" if team == "operations" else team
    return f"pager,{named}" if severity == "critical" else named


def test_the_configuration_of_alertmanager_is_sound():
    status, said = ran("amtool", "check-config", ALERTMANAGER)

    assert status == 0, said


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

    assert len(config["inhibit_rules"]) == 7
    assert named <= set(NAMES)


def test_no_installation_holds_back_what_another_has_to_say():
    config = yaml.safe_load(ALERTMANAGER.read_text())

    assert all("installation" in rule["equal"] for rule in config["inhibit_rules"])


def test_all_targets_say_of_which_installation_they_are():
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())

    groups = [group for job in config["scrape_configs"] for group in job["static_configs"]]

    assert [group["labels"] for group in groups] == [{"installation": "production"}] * 3


@every("rule", [rule for rule in RULES if rule.get("alert") != "Watchdog"], name=lambda rule: rule.get("alert"))
def test_no_rule_mixes_installations(rule):
    kept = re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", rule["expr"])
    bare = re.findall(r"\b(?:sum|max|min|count|avg|group)\s*\(", re.sub(r"absent\(group\(", "", rule["expr"]))

    assert bare == []
    assert all(labels.split(", ")[0] == "installation" for labels in kept)


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory):
    """A real Alertmanager with the example's configuration, on loopback; nobody hears its webhooks."""
    program = found("prometheus-alertmanager")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        *(program, f"--config.file={ALERTMANAGER}", f"--web.listen-address={address}", "--cluster.listen-address="),
        f"--storage.path={tmp_path_factory.mktemp('alertmanager')}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}/api/v2"
        finally:
            process.kill()


def tell(api, alerts):
    """Send alerts to Alertmanager, and return which of them it holds back."""
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(f"{api}/alerts", body, {"Content-Type": "application/json"})
    until = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            with urllib.request.urlopen(f"{api}/alerts", timeout=5) as answer:
                held = {key(one["labels"]): bool(one["status"]["inhibitedBy"]) for one in json.load(answer)}
        except OSError:
            held = {}
        known = {key(labels) for labels in alerts}
        if known <= set(held):
            return {one: held[one] for one in known}
        assert time.monotonic() < until
        Event().wait(0.05)


def key(labels):
    return tuple(labels.get(name, "") for name in ("alertname", "installation", "batch", "window", "reason"))


OF_SCHEDULER = (
    *("BatchSchedulerStalled", "BatchNotEnqueued", "BatchScheduleMissing", "BatchNotSucceeded"),
    *("BatchBacklogTooOld", "BatchNotProgressing"),
)
OF_WORKERS = ("BatchQueueLatencyHigh", "BatchNotSucceeded", "BatchBacklogTooOld", "BatchNotProgressing")
OF_CLOCK = (
    *("BatchTimestampAhead", "BatchTicksAhead", "BatchNotSucceeded", "BatchNotEnqueued", "BatchScheduleMissing"),
    *("BatchSchedulerStalled", "BatchSchedulerMisfires", "BatchStartedLate", "BatchRunStuck", "BatchWorkerLost"),
    *("BatchBacklogTooOld", "BatchNotProgressing", "BatchQueueLatencyHigh", "BatchLeaseStuck", "BatchBucketStuck"),
    *("BatchBucketRecoveries", "BatchBucketsMissing"),
)
OF_FUTURE = ("BatchTicksAhead", "BatchNotSucceeded", "BatchNotEnqueued", "BatchSchedulerStalled")

# Each cause in an installation of its own, which keeps the cases apart.
INHIBITED = [
    (
        "BatchErrorBudgetBurn",
        {"batch": "prune", "window": "1h"},
        "BatchErrorBudgetBurn",
        {"batch": "prune", "window": "6h"},
    ),
    ("BatchNotSucceeded", {"batch": "prune"}, "BatchConsecutiveFailures", {"batch": "prune"}),
    ("BatchNotSucceeded", {"batch": "prune"}, "BatchLeaseContention", {"batch": "prune"}),
    *(("BatchSchedulerDown", {}, name, {"batch": "prune"}) for name in OF_SCHEDULER),
    *(("BatchWorkersDown", {}, name, {"batch": "prune"}) for name in OF_WORKERS),
    *(("BatchClockOff", {}, name, {"batch": "prune"}) for name in OF_CLOCK),
    ("BatchClockOff", {}, "BatchBlocked", {"batch": "prune", "reason": "clocks"}),
    *(("BatchTimestampAhead", {}, name, {"batch": "prune"}) for name in OF_FUTURE),
]


def test_what_follows_from_a_cause_is_held_back_and_nothing_else(alertmanager):
    def of(cause, name, labels):
        return {"alertname": name, "installation": f"with {cause}", **labels}

    causes = [of(cause, cause, labels) for cause, labels, _, _ in INHIBITED]
    results = [of(cause, name, labels) for cause, _, name, labels in INHIBITED]
    bystanders = [
        # Of another batch, another reason, another name; and each result in an installation that has no such cause.
        of("BatchErrorBudgetBurn", "BatchErrorBudgetBurn", {"batch": "git_ref_cleanup", "window": "6h"}),
        of("BatchNotSucceeded", "BatchConsecutiveFailures", {"batch": "git_ref_cleanup"}),
        of("BatchNotSucceeded", "BatchLeaseContention", {"batch": "git_ref_cleanup"}),
        *(of(cause, "BatchDeadLetters", {"batch": "prune"}) for cause in {cause for cause, *_ in INHIBITED}),
        *(
            of("BatchClockOff", "BatchBlocked", {"batch": "prune", "reason": reason})
            for reason in ("no_store", "schema")
        ),
        *(of(f"no {cause} beside {name}", name, labels) for cause, _, name, labels in INHIBITED),
    ]

    before = tell(alertmanager, [*results, *bystanders])
    tell(alertmanager, causes)
    wanted, until = {key(labels) for labels in results}, time.monotonic() + 30
    while (held := {one for one, is_held in tell(alertmanager, [*results, *bystanders]).items() if is_held}) < wanted:
        assert time.monotonic() < until, wanted - held
        Event().wait(0.05)  # it learns of new causes a moment later

    # Some are causes in another case, and hold their own results back from the start.
    assert not any(before[key(labels)] for labels in bystanders)
    assert held == wanted
