"""The Helm chart: its objects are valid, name only settings and commands that exist, and give each process its own rights."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator_models
from prometheus_client import CollectorRegistry

from forgekeeper.api.batches import list_queues
from forgekeeper.delivery import boot
from forgekeeper.platform.settings import PREFIX, build_settings_class
from forgekeeper.platform.settings.secret_files import FILE_SUFFIX, list_secret_settings
from metrics.endpoint import MetricsEndpoint, open_listening_socket
from tests.harness.every import every
from tests.harness.helm import CHART, RELEASE, find_refusal, render, run_helm
from tests.metrics.pages import ran

from .test_pages import parse

ROOT = Path(__file__).parents[2]
VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
RULES = yaml.safe_load((ROOT / "metrics" / "alerts.yml").read_text())
OPERATOR_API = "monitoring.coreos.com/v1"
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.27", "1.37"
CHART_SETTINGS = {
    *("DATABASE_URL", "REDIS_URL", "REPOSITORIES_ROOT", "ACTOR", "WORKER_PROCESSES", "WORKER_THREADS", "FAILPOINTS"),
    *("METRICS_PORT_WORKER", "METRICS_PORT_SCHEDULER", "METRICS_PORT_EXPORTER"),
    *("CONSOLE_HOST", "CONSOLE_PORT", "CONSOLE_ACTIONS", "CONSOLE_USERS", "CONSOLE_PROXY"),
    *("CONSOLE_TLS_CERTIFICATE", "CONSOLE_TLS_KEY", "CONSOLE_TOKENS"),
    *("WEBHOOK_URL", "WEBHOOK_SECRET", "SENTRY_DSN", "TRACING"),
}
"""Settings that other values of the chart set, or that no process of a cluster needs."""
TRACING_VARIABLES = {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER"}
OTHER_PROGRAMS_VARIABLES = {"SENTRY_ENVIRONMENT", *TRACING_VARIABLES}
"""Variables of the SDKs of Sentry and OpenTelemetry."""
EVERYTHING = {
    "installation": "staging",
    "image": {
        "repository": "registry.example/forgekeeper",
        "digest": f"sha256:{64 * '0'}",
        "pullSecrets": ["registry"],
    },
    "settings": {"FORGEKEEPER_SHUTDOWN_TIMEOUT": "60.5", "FORGEKEEPER_CRON_PRUNE": "0 3 * * *"},
    "objectStores": {"inSecrets": True, "volume": {"nfs": {"server": "nfs.example", "path": "/objects"}}},
    "repositories": {"volume": {"persistentVolumeClaim": {"claimName": "repositories"}}},
    "forge": {"user": 998, "group": 997},
    "migrate": {"resources": {"limits": {"memory": "1Gi"}}},
    "workers": {name: {"autoscaling": {"enabled": True}} for name in ("runs", "children")},
    "console": {"actions": True, "usersSecret": "users", "tlsSecret": "tls", "tokensSecret": "tokens"},
    "exporter": {"webhookSecret": "webhook"},
    "sentry": {"dsnSecret": "sentry"},
    "tracing": {
        "endpoint": "http://collector:4318",
        "headersSecret": "headers",
        "variables": {"OTEL_TRACES_SAMPLER": "always_on"},
    },
    "monitoring": {"serviceMonitors": True, "rules": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"database": {"ports": [6432], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
    "serviceAccount": {"annotations": {"role": "forgekeeper"}},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
NOTHING = {
    **{name: {"enabled": False} for name in ("migrate", "console", "cli", "podDisruptionBudget", "networkPolicy")},
    "topologySpread": {"enabled": False},
    "serviceAccount": {"create": False},
}
VARIATIONS = {
    "defaults": {},
    "everything": EVERYTHING,
    # One option each, with a port of its own.
    "webhook": {"exporter": {"webhookSecret": "webhook"}, "networkPolicy": {"webhook": {"ports": [8443]}}},
    "sentry": {"sentry": {"dsnSecret": "sentry"}, "networkPolicy": {"sentry": {"ports": [9000]}}},
    "traces": {"tracing": EVERYTHING["tracing"]},
    "users": {"console": {"usersSecret": "users"}},
    "tokens": {"console": {"usersSecret": "users", "tokensSecret": "tokens"}},
    "nothing": NOTHING,
    "console behind a proxy": {
        "migrate": {"grants": False},
        "console": {"actions": True, "proxy": "10.0.0.0/8, fd00::1"},
    },
    "another worker": {
        "workers": {
            "children": {"queues": ["git"]},
            "artifacts": {
                "queues": ["artifacts", "mine"],
                "replicas": 1,
                "processes": 1,
                "threads": 10,
                "resources": {"limits": {"memory": "1Gi"}},
                "autoscaling": {"enabled": False},
            },
        }
    },
}


@cache
def objects(variation):
    return render(VARIATIONS[variation])


def kind(variation, name):
    return [one for one in objects(variation) if one["kind"] == name]


def pods(variation):
    """Return the templates of the variation's pods, by the name of their Deployment or Job without the release's."""
    return {
        one["metadata"]["name"].removeprefix(f"{RELEASE}-"): one["spec"]["template"]
        for one in objects(variation)
        if one["kind"] in {"Deployment", "Job"}
    }


def every_pod(*left_out):
    """Check a claim for each pod of all variations."""
    found = [(one, name, pod) for one in VARIATIONS for name, pod in pods(one).items() if name not in left_out]
    return every("variation, name, pod", found, lambda row: f"{row[0]}: {row[1]}")


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def environment(pod):
    """Return the variables of the pod; the value of a variable from a Secret is empty."""
    return {one["name"]: one.get("value", "") for one in container(pod)["env"]}


def secret_files(pod):
    """List the Secrets in the folder of secrets, each with its keys."""
    (folder,) = [volume["projected"] for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"]
    return [(one["secret"]["name"], [item["path"] for item in one["secret"]["items"]]) for one in folder["sources"]]


def secrets(pod):
    """Name the Secrets that the pod reads, in files or variables."""
    volumes = {volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    variables = {one["valueFrom"]["secretKeyRef"]["name"] for one in container(pod)["env"] if "valueFrom" in one}
    return volumes | variables | {name for name, _ in secret_files(pod)}


def commands(pod):
    """List the command lines of forgekeeper that the pod runs."""
    words = container(pod).get("command", ["tini", "--", "forgekeeper", *container(pod).get("args", [])])
    if words[2] == "sh":
        return words[-1].splitlines()
    return [shlex.join(words[2:])] if words[2] == "forgekeeper" else []


def matches(selector, labels):
    """Check labels against a selector of Kubernetes; of expressions it knows `In`."""
    assert {one["operator"] for one in selector.get("matchExpressions", [])} <= {"In"}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
    )


def selected(variation, selector):
    """Name the pods that a selector selects."""
    return {name for name, pod in pods(variation).items() if matches(selector, pod["metadata"]["labels"])}


@every("values", VARIATIONS.values())
def test_lint_has_no_complaint(values):
    status, said, _ = run_helm("lint", "--strict", values=values)

    assert (status, re.findall(r"\[(?:WARNING|ERROR)\].*", said)) == (0, [])


@every("variation", VARIATIONS)
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(variation):
    ours = [one for one in objects(variation) if one["apiVersion"] != OPERATOR_API]

    assert ours
    for one in ours:
        for version in (OLDEST_KUBERNETES, NEWEST_KUBERNETES):
            kubernetes_validate.validate(one, version, strict=True)


@every("one", [one for one in objects("everything") if one["apiVersion"] == OPERATOR_API], name=lambda one: one["kind"])
def test_every_object_for_prometheus_operator_is_valid_and_has_no_unknown_field(one):
    read = getattr(operator_models, one["kind"]).model_validate(one)

    # The models ignore unknown fields, so a copy lacks them.
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == one


@every("variation", VARIATIONS)
def test_names_are_unique_and_every_label_of_a_selector_is_on_its_pods(variation):
    names = [(one["kind"], one["metadata"]["name"]) for one in objects(variation)]
    deployments = kind(variation, "Deployment")

    assert len(names) == len(set(names))
    assert [selected(variation, one["spec"]["selector"]) for one in deployments] == [
        {one["metadata"]["name"].removeprefix(f"{RELEASE}-")} for one in deployments
    ]


def test_without_options_only_workers_schedulers_and_an_exporter_are_left():
    assert {one["kind"] for one in objects("nothing")} == {"Deployment"}
    assert pods("nothing").keys() == {"scheduler", "worker-runs", "worker-children", "exporter"}


def test_the_oldest_kubernetes_of_the_tests_is_the_chart_s():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["kubeVersion"] == f">={OLDEST_KUBERNETES}.0-0"


def test_the_chart_has_the_version_of_forgekeeper():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^fallback_version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

    assert (chart["version"], chart["appVersion"]) == (version, version)


@every_pod()
def test_every_command_of_a_pod_exists(variation, name, pod):
    lines = commands(pod)

    assert lines or name == "cli"
    for line in lines:
        parse(line)


@every_pod()
def test_every_setting_of_a_pod_exists(variation, name, pod):
    settings = boot.settings_class()
    names = {PREFIX + field.upper() for field in settings.model_fields}
    files = {PREFIX + field.upper() + FILE_SUFFIX for field in list_secret_settings(settings)}

    assert environment(pod).keys() <= names | files | OTHER_PROGRAMS_VARIABLES


@every_pod()
def test_every_pod_s_settings_are_accepted_together(variation, name, pod, tmp_path, monkeypatch):
    secrets = {
        "database_url": "postgresql://forgekeeper@db.example/forge",
        "redis_url": "redis://redis.example",
        "object_stores": '{"artifacts": "s3://artifacts?region=eu-west-1"}',
        "webhook_url": "https://hooks.example/forgekeeper",
        "webhook_secret": "whsec_aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg==",
        "sentry_dsn": "https://key@sentry.example/1",
    }
    for file, secret in secrets.items():
        (tmp_path / file).write_text(secret)
    with monkeypatch.context() as process:
        for setting, value in environment(pod).items():
            process.setenv(setting, value.replace("/run/secrets/forgekeeper", str(tmp_path)))

        settings = boot.load_settings()

    assert settings.database_url.get_secret_value() == secrets["database_url"]


def test_the_schema_allows_every_setting_but_those_that_other_values_set():
    allowed = SCHEMA["properties"]["settings"]["propertyNames"]["anyOf"]
    general = {PREFIX + field.upper() for field in build_settings_class(()).model_fields}
    of_batches = {PREFIX + field.upper() for field in boot.settings_class().model_fields} - general

    assert set(allowed[0]["enum"]) == general - {PREFIX + name for name in CHART_SETTINGS}
    assert of_batches
    assert [name for name in of_batches if not re.search(allowed[1]["pattern"], name)] == []


@every("variation", VARIATIONS)
def test_every_queue_is_served_by_exactly_one_worker(variation):
    lines = [line for pod in pods(variation).values() for line in commands(pod)]
    served = ",".join(found[1] for line in lines if (found := re.search(r"worker --queues (\S+)", line))).split(",")

    assert len(served) == len(set(served))
    assert set(list_queues()) <= set(served)


@every_pod()
def test_every_pod_has_the_secret_of_its_role_and_no_other(variation, name, pod):
    acts = environment(pod).get("FORGEKEEPER_CONSOLE_ACTIONS") == "on"
    role = {"migrate": "owner", "cli": "person", "console": "person" if acts else "console"}.get(
        name, name.split("-")[0]
    )

    assert {one for one in secrets(pod) if one.startswith("forgekeeper-")} == {f"forgekeeper-{role}"}
    assert not {"users", "tls", "tokens"} & secrets(pod) or name == "console"


@every_pod()
def test_every_file_of_a_secret_setting_is_mounted(variation, name, pod):
    mounted = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    files = {f"{mounted['secrets']}/{path}" for _, paths in secret_files(pod) for path in paths}

    assert files == {value for setting, value in environment(pod).items() if setting.endswith(FILE_SUFFIX)}


def test_only_processes_that_use_object_stores_get_their_keys():
    found = {name for name, pod in pods("everything").items() if "FORGEKEEPER_OBJECT_STORES_FILE" in environment(pod)}

    assert found == {"worker-runs", "worker-children", "exporter", "console", "cli"}


def test_only_the_worker_of_the_queue_git_and_people_write_into_the_repositories():
    def may_write(pod):
        return any(
            one["name"] == "repositories" and not one.get("readOnly", False) for one in container(pod)["volumeMounts"]
        )

    assert {name for name, pod in pods("everything").items() if may_write(pod)} == {"worker-children", "cli"}


def test_pods_that_mount_the_repositories_run_as_their_owner_and_no_others():
    everything = pods("everything")
    users = {name: pod["spec"]["securityContext"] for name, pod in everything.items()}
    owners = {name for name, user in users.items() if (user["runAsUser"], user["runAsGroup"]) == (998, 997)}

    assert owners == {
        name
        for name, pod in everything.items()
        if "repositories" in {mount["name"] for mount in container(pod)["volumeMounts"]}
    }
    assert everything.keys() - owners == {"scheduler", "migrate"}


@every_pod()
def test_every_pod_is_hardened_and_limited(variation, name, pod):
    spec, only = pod["spec"], container(pod)

    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "tmp", "mountPath": "/tmp"} in only["volumeMounts"]
    assert "memory" in only["resources"]["limits"]
    # Kubernetes would name other Services in variables that begin as our settings do.
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)


@every_pod()
def test_every_pod_has_more_time_to_end_than_its_shutdown_timeout(variation, name, pod):
    given = environment(pod).get("FORGEKEEPER_SHUTDOWN_TIMEOUT")
    timeout = float(given or boot.settings_class().model_fields["shutdown_timeout"].default)

    assert pod["spec"]["terminationGracePeriodSeconds"] >= timeout + 15


@every_pod("migrate", "cli")
def test_every_process_is_probed_at_the_port_of_its_setting(variation, name, pod):
    only = container(pod)
    (port,) = only["ports"]
    probes = [only[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    gets = [probe["httpGet"] for probe in probes if "httpGet" in probe]
    programs = [probe["exec"]["command"][-1] for probe in probes if "exec" in probe]

    assert str(port["containerPort"]) in {
        value for setting, value in environment(pod).items() if re.search(r"_PORT(?!.*FILE)", setting)
    }
    assert [get["path"] for get in gets] in ([], ["/livez", "/livez", "/readyz"])
    assert {get["port"] for get in gets} <= {port["name"]}
    assert [re.findall(r"'(/\w+)'", program) for program in programs] in ([], [["/livez"], ["/livez"], ["/readyz"]])
    assert all(f"'127.0.0.1', {port['containerPort']}" in program for program in programs)
    # A kubelet reaches loopback addresses only by a program in the container.
    assert bool(programs) == (name == "console" and "FORGEKEEPER_CONSOLE_HOST" not in environment(pod))


@pytest.fixture
def draining_endpoint():
    endpoint = MetricsEndpoint(
        open_listening_socket("127.0.0.1", 0, "the endpoint"),
        CollectorRegistry(),
        find_unready_reason=lambda: "it drains",
        find_stalled_reason=lambda: None,
    )
    endpoint.start()
    yield endpoint
    endpoint.shutdown()
    endpoint.server_close()


@every("probe, status", [("livenessProbe", 0), ("readinessProbe", 1)])
def test_the_program_that_probes_a_console_on_loopback_asks_its_path(draining_endpoint, probe, status):
    only = container(pods("defaults")["console"])
    words = [word.replace("9190", str(draining_endpoint.server_port)) for word in only[probe]["exec"]["command"]]

    done = subprocess.run([sys.executable, *words[1:]], check=False, timeout=60)

    assert done.returncode == status


@every("variation, lines", [
    ("defaults", ["forgekeeper migrate", "forgekeeper grants --all"]),
    ("console behind a proxy", ["forgekeeper migrate"]),
])  # fmt: skip
def test_the_migration_is_a_hook_that_grants_the_roles_their_rights(variation, lines):
    (job,) = kind(variation, "Job")

    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert commands(job["spec"]["template"]) == lines


def test_the_owner_can_run_another_command():
    values = {"migrate": {"command": ["adopt", "gitlab", "--role", "forgekeeper_worker"]}}

    (job,) = render(values, "--show-only", "templates/migrate.yaml")

    assert commands(job["spec"]["template"]) == ["forgekeeper adopt gitlab --role forgekeeper_worker"]


@every("variation", ["defaults", "everything", "another worker"])
def test_budgets_are_for_schedulers_and_each_kind_of_worker_and_block_no_drain(variation):
    budgets = kind(variation, "PodDisruptionBudget")

    assert [one["spec"]["maxUnavailable"] for one in budgets] == [1] * len(budgets)
    assert sorted(sorted(selected(variation, one["spec"]["selector"])) for one in budgets) == sorted(
        [name] for name in pods(variation) if name == "scheduler" or name.startswith("worker-")
    )


def allowed_ports(variation, name, direction):
    labels = pods(variation)[name]["metadata"]["labels"]
    policies = [one["spec"] for one in kind(variation, "NetworkPolicy") if matches(one["spec"]["podSelector"], labels)]
    assert direction.capitalize() in {each for one in policies for each in one["policyTypes"]}
    return {port["port"] for one in policies for rule in one.get(direction, []) for port in rule["ports"]}


@every("name", ["scheduler", "migrate"])
def test_processes_without_object_stores_reach_postgresql_redis_and_dns_alone(name):
    assert allowed_ports("defaults", name, "egress") == {53, 5432, 6379}


@every("name", ["worker-runs", "worker-children", "exporter", "console", "cli"])
def test_processes_with_object_stores_reach_them_too(name):
    assert allowed_ports("defaults", name, "egress") == {53, 5432, 6379, 443}


REPORTING = {"scheduler", "worker-runs", "worker-children", "exporter"}
TRACED = {"worker-runs", "worker-children", "cli"}
WEBHOOK_FILES = {"FORGEKEEPER_WEBHOOK_URL_FILE", "FORGEKEEPER_WEBHOOK_SECRET_FILE"}


@every("option, without, processes, expected", [
    ("webhook", "defaults", {"exporter"}, (WEBHOOK_FILES, {"webhook"}, {8443})),
    ("sentry", "defaults", REPORTING, ({"FORGEKEEPER_SENTRY_DSN_FILE", "SENTRY_ENVIRONMENT"}, {"sentry"}, {9000})),
    ("traces", "defaults", TRACED, ({"FORGEKEEPER_TRACING", *TRACING_VARIABLES}, {"headers"}, {4318})),
    ("tokens", "users", {"console"}, ({"FORGEKEEPER_CONSOLE_TOKENS"}, {"tokens"}, set())),
])  # fmt: skip
def test_an_option_gives_its_settings_its_secret_and_its_connection_to_the_processes_that_use_it_alone(
    option, without, processes, expected
):
    for name, pod in pods(option).items():
        before = pods(without)[name]
        added = (
            environment(pod).keys() - environment(before).keys(),
            secrets(pod) - secrets(before),
            allowed_ports(option, name, "egress") - allowed_ports(without, name, "egress"),
        )
        assert added == (expected if name in processes else (set(), set(), set())), name


def test_without_options_no_pod_has_their_settings_and_no_connection_is_allowed_for_them():
    variables = {name for pod in pods("defaults").values() for name in environment(pod)}
    policies = {one["metadata"]["name"].removeprefix(f"{RELEASE}-") for one in kind("defaults", "NetworkPolicy")}

    assert [name for name in variables if re.search("WEBHOOK|SENTRY|TRACING|OTEL|TOKENS", name)] == []
    assert policies == {RELEASE, "stores", "metrics"}


def test_the_environment_in_sentry_is_the_installation():
    assert {environment(pods("everything")[name])["SENTRY_ENVIRONMENT"] for name in REPORTING} == {"staging"}


def test_only_metrics_and_a_served_console_accept_connections():
    accepting = {
        variation: {name: allowed_ports(variation, name, "ingress") for name in pods(variation)}
        for variation in ("defaults", "everything")
    }

    metrics = {name: {"metrics"} for name in ("scheduler", "worker-runs", "worker-children", "exporter")}
    assert accepting["defaults"] == {**metrics, "console": set(), "cli": set(), "migrate": set()}
    assert accepting["everything"] == {**metrics, "console": {"console"}, "cli": set(), "migrate": set()}


def test_prometheus_scrapes_the_jobs_that_rules_and_dashboards_ask_for():
    services = {one["metadata"]["name"]: one for one in kind("everything", "Service")}
    jobs = {}
    for monitor in kind("everything", "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        found = [
            one
            for one in services.values()
            if matches(monitor["spec"]["selector"], one["metadata"]["labels"])
            and endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
        ]
        scraped = set().union(*(selected("everything", {"matchLabels": one["spec"]["selector"]}) for one in found))
        labels = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
        jobs[labels["job"]] = (scraped, labels["installation"], monitor["metadata"]["labels"]["release"])

    ours = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs.keys() == {job["job_name"] for job in ours}
    assert jobs == {
        "forgekeeper-worker": ({"worker-runs", "worker-children"}, "staging", "prometheus"),
        "forgekeeper-scheduler": ({"scheduler"}, "staging", "prometheus"),
        "forgekeeper-exporter": ({"exporter"}, "staging", "prometheus"),
    }


def test_the_rules_are_the_project_s():
    (rule,) = kind("everything", "PrometheusRule")

    assert rule["spec"] == RULES


def page_blocks():
    """Return the blocks of YAML on the page."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    return [yaml.safe_load(text) for text in re.findall(r"^ *```yaml\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)]


def adapter_rule():
    """Return the rule of prometheus-adapter on the page."""
    ((rule,),) = [block["rules"]["external"] for block in page_blocks() if "rules" in block]
    return rule


@every("values", [block for block in page_blocks() if "rules" not in block])
def test_the_chart_accepts_the_values_of_the_page(values):
    assert {"Job", "Deployment"} <= {one["kind"] for one in render(values)}


def test_workers_are_scaled_by_the_metric_that_the_adapter_serves():
    scalers = kind("everything", "HorizontalPodAutoscaler")
    metrics = [one["spec"]["metrics"][0]["external"]["metric"] for one in scalers]
    scaled = {one["spec"]["scaleTargetRef"]["name"].removeprefix(f"{RELEASE}-") for one in scalers}

    assert scaled == {"worker-runs", "worker-children"}
    assert {one["name"] for one in metrics} == {adapter_rule()["name"]["as"]}
    assert {one["selector"]["matchLabels"]["installation"] for one in metrics} == {"staging"}
    assert sorted(queue for one in metrics for queue in one["selector"]["matchExpressions"][0]["values"]) == sorted(
        list_queues()
    )
    deployments = {one["metadata"]["name"].removeprefix(f"{RELEASE}-"): one for one in kind("everything", "Deployment")}
    assert {name for name, one in deployments.items() if "replicas" not in one["spec"]} == scaled


def test_the_adapter_serves_the_age_of_the_oldest_message_and_zero_for_empty_queues(tmp_path):
    rule = adapter_rule()
    series = re.match(r"\w+", rule["seriesQuery"])[0]

    def query(queues):
        matchers = f'namespace="forge",installation="staging",queue_name=~"{queues}"'
        return rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.LabelMatchers>>", matchers)

    def given(metric, queue, values, **labels):
        labels = {"namespace": "forge", "installation": "staging", "queue_name": queue, **labels}
        pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return {"series": f"{metric}{{{pairs}}}", "values": values}

    oldest = "forgekeeper_queue_oldest_message_timestamp_seconds"
    world = [
        *(given("forgekeeper_queue_messages", name, "7x20", state="ready") for name in list_queues()),
        given(oldest, "git", "540x20"),
        # A second exporter, and a queue whose head is due in the future.
        given(oldest, "git", "480x20", instance="other"),
        given(oldest, "objects", "9999x20"),
    ]
    ages = {"git|artifacts": 120, "artifacts": 0, "cron|objects": 0}
    test = {
        "rule_files": [],
        "tests": [
            {
                "interval": "1m",
                "input_series": world,
                "promql_expr_test": [
                    {"expr": query(queues), "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": age}]}
                    for queues, age in ages.items()
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))

    status, said = ran("promtool", "test", "rules", tmp_path / "test.yml")

    assert status == 0, said


@every("value, reason", [
    ("{replica: 3}", "replica"),
    ("{scheduler: {replicas: two}}", "replicas"),
    ("{scheduler: {replicas: 0}}", "replicas"),
    ("{scheduler: {resources: {limit: {memory: 1Gi}}}}", "limit"),
    ("{scheduler: {resources: {limits: {memory: lots}}}}", "memory"),
    ("{settings: {FORGEKEEPER_SHUTDOWN_TIMOUT: '60'}}", "FORGEKEEPER_SHUTDOWN_TIMOUT"),
    ("{settings: {FORGEKEEPER_SHUTDOWN_TIMEOUT: 60}}", "FORGEKEEPER_SHUTDOWN_TIMEOUT"),
    ("{settings: {FORGEKEEPER_DATABASE_URL: 'postgresql://u:secret@h/f'}}", "settings"),
    ("{secrets: {owners: forgekeeper}}", "owners"),
    ("{secrets: {owner: ''}}", "owner"),
    ("{image: {digest: 'sha1:00'}}", "digest"),
    ("{image: {pullPolicy: Sometimes}}", "pullPolicy"),
    ("{migrate: {grants: {worker: forgekeeper}}}", "grants"),
    ("{workers: {runs: {queue: [cron]}}}", "queue"),
    ("{workers: {runs: {autoscaling: {enabled: true, maxReplicas: many}}}}", "maxReplicas"),
    ("{workers: {runs: {queues: [cron]}}}", "no worker serves the queue objects"),
    ("{workers: {runs: {queues: [cron, objects, git]}}}", "both serve the queue git"),
    ("{repositories: {volume: {nfs: {}, hostPath: {}}}}", "volume"),
    ("{forge: {user: 0}}", "user"),
    ("{networkPolicy: {metricsFrom: []}}", "metricsFrom"),
    ("{monitoring: {consoleUrl: keeper}}", "consoleUrl"),
    ("{objectStores: {inSecrets: true}, settings: {FORGEKEEPER_OBJECT_STORES: '{}'}}", "both set"),
    ("{settings: {FORGEKEEPER_TRACING: otlp}}", "FORGEKEEPER_TRACING"),
    ("{tracing: {endpoint: 'collector:4318'}}", "endpoint"),
    ("{tracing: {variables: {HTTPS_PROXY: proxy}}}", "HTTPS_PROXY"),
    ("{tracing: {variables: {OTEL_EXPORTER_OTLP_HEADERS: 'api-key=secret'}}}", "OTEL_EXPORTER_OTLP_HEADERS"),
    ("{exporter: {webhookUrl: 'https://hooks.example'}}", "webhookUrl"),
    ("{console: {tokensSecret: tokens}}", "console.usersSecret or console.proxy"),
    ("{console: {actions: true}}", "console.usersSecret or console.proxy"),
    ("{console: {tlsSecret: tls}}", "console.usersSecret or console.proxy"),
])  # fmt: skip
def test_wrong_values_are_refused_by_name(value, reason):
    assert reason in find_refusal(value)


def properties(schema):
    """Return the schema's own definition instead of a reference to it."""
    reference = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][reference] if reference else schema


def names_of(schema, values, path=()):
    """Yield the path of each value that the schema describes; workers are described once for all names."""
    schema = properties(schema)
    described = schema.get("properties") if schema.get("additionalProperties") is False else None
    if described is None and path == ("workers",):
        described = dict.fromkeys(values, schema["additionalProperties"])
    for name, each in (described or {}).items():
        yield (*path, name)
        yield from names_of(each, values[name] if isinstance(values, dict) and name in values else {}, (*path, name))


def paths(values, path=()):
    for name, value in values.items():
        yield (*path, name)
        yield from paths(value, (*path, name)) if isinstance(value, dict) else ()


def test_the_values_have_every_name_of_the_schema_and_no_other():
    # Requests and limits may be left out, and Helm hands `global` to every chart.
    optional = {"limits", "requests", "global"}
    described, present = names_of(SCHEMA, yaml.safe_load(VALUES)), paths(yaml.safe_load(VALUES))

    assert {path for path in described if not optional & set(path)} == {
        path for path in present if not optional & set(path)
    }


def test_every_value_has_a_comment():
    lines = VALUES.splitlines()
    shapes = r"requests|limits|- "

    bare = [
        line
        for above, line in pairwise(lines)
        if re.match(rf" *(?!{shapes})\w+: *\S", line) and not above.lstrip().startswith("#")
    ]
    assert bare == []


def rendered_notes(tmp_path, values, *arguments):
    """Return NOTES.txt as Helm prints it; `helm template` leaves it out, so another template includes it."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "templates" / "notes.yaml").write_text(
        'notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}\n'
    )
    (only,) = render(values, "--show-only", "templates/notes.yaml", *arguments, chart=chart)
    return only["notes"]


@every("options", [(), ("--is-upgrade",)])
def test_every_command_in_the_notes_exists(tmp_path_factory, options):
    notes = rendered_notes(tmp_path_factory.mktemp("notes"), VARIATIONS["webhook"], *options)
    lines = re.findall(r"(?<=FORGEKEEPER_ACTOR=YOUR_NAME )forgekeeper .+|(?<=-- )forgekeeper .+", notes)

    assert len(lines) >= 4
    assert "forgekeeper webhook test" in lines
    for line in lines:
        parse(line)


def test_the_notes_lead_a_new_installation_to_the_release_of_its_batches(tmp_path):
    notes = rendered_notes(tmp_path, {})

    steps = [notes.index(step) for step in ("check --init", "--dry-run", "release --all", "flags on")]
    assert steps == sorted(steps)
    assert "port-forward deploy/forgekeeper-console 9190:9190" in notes
