"""`files` writes what operators put beside forgekeeper, with their own addresses, and keeps what they have changed."""

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.helm import CHART, render
from tests.metrics.pages import ran

ROOT = Path(__file__).parents[2]
URLS = ("--console", "https://keeper.internal/", "--grafana", "https://grafana.internal")


@pytest.fixture
def written(main, tmp_path):
    result = main("files", str(tmp_path / "f"), *URLS, "--json")
    assert result.status == 0, result.stderr
    return tmp_path / "f", result.json["files"]


def test_everything_below_deploy_is_written_with_the_rules_and_the_compose_file(written):
    folder, names = written

    deployed = {str(file.relative_to(ROOT)) for file in (ROOT / "deploy").rglob("*") if file.is_file()}
    assert set(names) == deployed | {"metrics/alerts.yml", "compose.yaml"}
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(names)


def test_rules_and_dashboards_lead_to_the_operator_s_console_and_grafana(written):
    folder, names = written

    assert [name for name in names if ".example/" in (folder / name).read_text() and "grafana" in name] == []
    rules = (folder / "metrics/alerts.yml").read_text()
    assert "https://keeper.internal/runbooks/slow_runs#" in rules
    assert (rules.count("forgekeeper.example"), rules.count("grafana.example")) == (0, 0)
    for dashboard in (folder / "deploy/grafana/dashboards").iterdir():
        json.loads(dashboard.read_text())
    status, said = ran("promtool", "check", "config", folder / "deploy/prometheus.yml")
    assert status == 0, said


def test_the_compose_file_needs_no_checkout(written):
    folder, _ = written

    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounted = {
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if isinstance(volume, str) and volume.startswith("./")
    }
    assert [name for name in mounted if not (folder / name).exists()] == []
    assert [name for name, service in services.items() if "build" in service] == []


def test_the_chart_has_the_same_addresses_as_its_values_would_give_it(written):
    folder, _ = written
    monitoring = {"rules": True, "serviceMonitors": True}
    urls = {"consoleUrl": URLS[1], "grafanaUrl": URLS[3]}

    objects = render({"monitoring": monitoring}, chart=folder / CHART.relative_to(ROOT))

    assert objects == render({"monitoring": {**monitoring, **urls}}) != render({"monitoring": monitoring})


def test_a_file_that_was_changed_is_kept_unless_it_is_forced(main, written):
    folder, _ = written
    (folder / "deploy/prometheus.yml").write_text("mine")

    refused, again = main("files", str(folder), *URLS), (folder / "deploy/prometheus.yml").read_text()

    assert (refused.status, again) == (1, "mine")
    assert "first deploy/prometheus.yml: --force replaces them" in refused.complaint
    assert main("files", str(folder), *URLS, "--force").status == 0
    assert (folder / "deploy/prometheus.yml").read_text() != "mine"


def test_an_address_that_is_none_is_refused(main, tmp_path):
    assert main("files", str(tmp_path), "--console", "keeper").status == 2
