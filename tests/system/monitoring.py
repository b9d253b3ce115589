"""A real Prometheus and a real Alertmanager with our rules and routes, at sixty times their pace, and who is told.

The one change that is made to `metrics/alerts.yml` and `deploy/*.yml` is `hurried`: every `for` and
`keep_firing_for`, every range of an expression and every interval is divided by `FASTER`, a minute becoming a second;
intervals between scrapes by `SCRAPES_FASTER` only.  Numbers that an expression compares with stay as they are.  Beyond
that only addresses differ.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
FASTER = 60
SCRAPES_FASTER = 12
"""A scrape may last no longer than its interval, and an exporter takes up to two seconds on a busy machine."""
DURATIONS = {"for", "keep_firing_for", "evaluation_interval", "group_wait", "group_interval", "repeat_interval"}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SUBJECTS = ("batch", "root", "flag", "job")
"""Labels that say what an alert is about, the first that it has."""
LIMIT = 30.0
EXAMPLE_SINK = "127.0.0.1:9099"


class Told(NamedTuple):
    """Somebody was told of an alert; *status* is `firing` or `resolved`."""

    receiver: str
    alert: str
    status: str


class Sink:
    """The far end of every receiver: it remembers who was told what."""

    def __init__(self):
        self.told = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="sink", daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def status(self, receiver, alert, *, since=0):
        """What the receiver was last told of the alert, None if nothing."""
        found = [told.status for told in self.told[since:] if told[:2] == (receiver, alert)]
        return found[-1] if found else None

    def _handler(self):
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver = self.path.strip("/")
                told.extend(Told(receiver, subject(one["labels"]), one["status"]) for one in body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        return Handler


def subject(labels):
    """Name an alert, and what it is about."""
    about = next((labels[label] for label in SUBJECTS if label in labels), "")
    return f"{labels['alertname']} {about}".strip()


def found(program):
    """Find Debian's program; where tests are to be complete it may not be missing."""
    path = shutil.which(program)
    if path is None:
        assert "CI" not in os.environ, f"{program} is missing: .ci/run installs it"
        pytest.skip(f"{program} is not installed (Debian: prometheus, prometheus-alertmanager)")
    return path


def hurried(part):
    """Return a document, or a part of one, with all durations divided by `FASTER`."""
    if isinstance(part, list):
        return [hurried(one) for one in part]
    if not isinstance(part, dict):
        return part
    quick = {}
    for key, value in part.items():
        if key in DURATIONS:
            quick[key] = _divided(value)
        elif key == "scrape_interval":
            quick[key] = _divided(value, by=SCRAPES_FASTER)
        elif key == "expr":
            quick[key] = re.sub(r"\[(\w+)\]", lambda match: f"[{_divided(match[1])}]", value)
        else:
            quick[key] = hurried(value)
    return quick


def _divided(duration, *, by=FASTER):
    number, unit = re.fullmatch(r"(\d+)([smhd])", duration).groups()
    return f"{int(number) * UNITS[unit] * 1000 // by}ms"


class Monitoring(NamedTuple):
    """Where Prometheus is, and who was told."""

    prometheus: str
    sink: Sink

    def firing(self):
        """The alerts that fire by Prometheus's account, whoever is told of them or not."""
        alerts = self._ask("alerts")["alerts"]
        return {subject(one["labels"]) for one in alerts if one["state"] == "firing"}

    def sees_all(self, pages):
        """Say whether so many pages are up, and no rule says anything else."""
        up = self._ask("query?query=sum(up)")["result"]
        return bool(up) and float(up[0]["value"][1]) == pages and not any("Down" in name for name in self.firing())

    def _ask(self, what):
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/{what}", timeout=5) as answer:
            return json.load(answer)["data"]


@contextmanager
def monitoring(folder, pages):
    """Watch the *pages*, a port by the name of each job; yield when Prometheus has seen them all."""
    port, alertmanager_port = free_ports(2)
    with ExitStack() as stack:
        sink = Sink()
        stack.callback(sink.close)
        routes = (ROOT / "deploy" / "alertmanager.yml").read_text().replace(EXAMPLE_SINK, sink.address)
        _write(folder / "prometheus-alertmanager.yml", hurried(yaml.safe_load(routes)))
        _write(folder / "alerts.yml", hurried(yaml.safe_load((ROOT / "metrics" / "alerts.yml").read_text())))
        _write(folder / "prometheus.yml", _scraping(pages, alertmanager_port))
        # What it sends in its first seconds, before it knows of Alertmanager, is lost until it is sent again.
        storage = f"--storage.tsdb.path={folder / 'prometheus'}"
        _start(stack, folder, "prometheus", port, storage, "--rules.alert.resend-delay=5s")
        watch = Monitoring(f"http://127.0.0.1:{port}", sink)
        # Until it has read every page for the first time it takes them for down; nobody is to hear of that.
        assert wait_until(lambda: watch.sees_all(len(pages)), LIMIT)
        storage = f"--storage.path={folder / 'alertmanager'}"
        _start(stack, folder, "prometheus-alertmanager", alertmanager_port, storage, "--cluster.listen-address=")
        yield watch


def _scraping(pages, alertmanager_port):
    """The example's configuration, with the pages' addresses in place of its own."""
    config = hurried(yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text()))
    config["rule_files"] = ["alerts.yml"]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager_port}"]
    for job in config["scrape_configs"]:
        (group,) = job["static_configs"]
        group["targets"] = [f"127.0.0.1:{pages[job['job_name']]}"]
    return config


def _write(path, document):
    path.write_text(yaml.safe_dump(document, allow_unicode=True))


def _start(stack, folder, program, port, *options):
    """Start one of both with its file; return when it is ready."""
    options = [f"--config.file={folder / program}.yml", f"--web.listen-address=127.0.0.1:{port}", *options]
    with (folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen([found(program), *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert wait_until(lambda: process.poll() is not None or _answers(port), LIMIT)


def _answers(port):
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5) as answer:
        return answer.status == 200
    return False
