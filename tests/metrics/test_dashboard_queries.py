"""Every query of every panel, asked of a real Prometheus: it is understood, and there is something to show."""

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress

import pytest

from tests.harness.every import every
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

from .dashboards import CHOICES, QUERIES, ROOT, variable
from .history import openmetrics

LIMIT = 60


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A folder with half an hour of everything that the catalogue names, as Prometheus stores it."""
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            assert "CI" not in os.environ, f"{program} is missing: .ci/run installs it from Debian's package prometheus"
            pytest.skip(f"{program} is not installed (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("history")
    # It ends before the rules' own samples begin: Prometheus takes none that are older than what it has.
    (folder / "history.om").write_text(openmetrics(time.time() - 2))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "history.om", folder / "data"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "data"


@pytest.fixture(scope="module")
def ask(blocks):
    """Ask a Prometheus that has the history, and evaluates our rules on it, as its HTTP API is asked."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    config = blocks.parent / "prometheus.yml"
    rules = ROOT / "metrics" / "alerts.yml"
    config.write_text(f"global: {{evaluation_interval: 1s}}\nrule_files: [{json.dumps(str(rules))}]\n")
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={blocks}"),
        f"--web.listen-address={address}",
    ]

    def get(path, **parameters):
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=LIMIT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            # What is wrong with a query stands in the answer's body.
            return json.load(error)

    def evaluated():
        with suppress(OSError, json.JSONDecodeError):
            found = get("query", query='ALERTS{alertname="GitRefCleanupDeadLetters"}')["data"]["result"]
            recorded = get("query", query="batch:schedule_patience_seconds:max")["data"]["result"]
            return bool(found and recorded)
        return False

    log = blocks.parent / "prometheus.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            assert wait_until(lambda: process.poll() is not None or evaluated(), LIMIT), log.read_text()
            assert process.poll() is None, log.read_text()
            yield get
        finally:
            process.kill()


def values(answer):
    """List all values of an answer."""
    assert answer["status"] == "success", answer["error"]
    assert "warnings" not in answer, answer["warnings"]
    for series in answer["data"]["result"]:
        for _instant, value in series.get("values") or [series["value"]]:
            yield float(value)


def put(asked, batch):
    """Ask the query as Grafana would, of the last 25 minutes."""
    alerts = variable(asked.board, "alerts")["query"]
    given = {"$__rate_interval": "1m", "$__range": "30m", "$batch": batch, "$alerts": alerts}
    expr = re.sub(r"\$\w+", lambda name: given[name[0]], asked.expr)
    if asked.now:
        return "query", {"query": expr}
    return "query_range", {"query": expr, "start": time.time() - 1500, "end": time.time(), "step": 60}


@every("asked", QUERIES)
def test_a_query_has_something_to_show(asked, ask):
    answered = []

    for batch in CHOICES if "$batch" in asked.expr else [None]:
        path, parameters = put(asked, batch)
        answered += values(ask(path, **parameters))

    assert any(math.isfinite(value) for value in answered)
