"""The container files name commands, files, settings, roles and users that exist, and open no port beyond this machine."""

import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import yaml

from forgekeeper.api.batches import list_queues
from forgekeeper.delivery import boot
from forgekeeper.platform.settings import PREFIX
from tests.harness.every import every

from .test_pages import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "containers"
COMPOSE = (ROOT / "compose.yaml").read_text()
FILES = [ROOT / "compose.yaml", ROOT / "Containerfile", *(file for file in FOLDER.rglob("*") if file.is_file())]
IMAGE = "forgekeeper:local"


def with_defaults(text):
    """Return the text as Compose reads it if `.env` sets nothing but passwords."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?)?\}", lambda found: found[1] if found[2] is None else found[2], text)


SERVICES = yaml.safe_load(with_defaults(COMPOSE))["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == IMAGE}


def commands(service):
    """List the command lines of forgekeeper that the service runs."""
    command = service.get("command", [])
    if "entrypoint" not in service:
        return [shlex.join(["forgekeeper", *(command or ["--help"])])]
    if "/prepare.sh" in service["entrypoint"]:
        lines = (FOLDER / "prepare.sh").read_text().replace("$process", "worker")
        return re.findall(r"^ *(forgekeeper .+)$", lines, re.MULTILINE)
    return re.findall(r"exec (forgekeeper .+)", command[0])


def mounts():
    """List the files of this repository that the services mount or read."""
    volumes = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    return [*(path for path in volumes if path.startswith(".")), *OURS["scheduler"]["env_file"]]


@every("name", [name for name in OURS if name != "cli"])
def test_every_service_runs_a_command_that_exists(name):
    lines = commands(OURS[name])

    assert lines
    for line in lines:
        parse(line)


def test_the_workers_serve_every_queue_and_each_queue_once():
    found = [re.search(r"--queues (\S+)", line) for service in OURS.values() for line in commands(service)]

    assert sorted(",".join(one[1] for one in found if one).split(",")) == sorted(list_queues())


@every("path", mounts())
def test_every_mounted_file_exists(path):
    assert (ROOT / path).exists()


@every("file", FILES)
def test_every_setting_that_a_file_names_is_one(file):
    settings = {PREFIX + field.upper() for field in boot.settings_class().model_fields}

    assert set(re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]\b", file.read_text())) <= settings


@every("name", SERVICES)
def test_every_service_is_hardened_and_its_ports_are_on_loopback(name):
    service = SERVICES[name]

    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert (service["read_only"], service["cap_drop"], service["security_opt"]) == (
        True,
        ["ALL"],
        ["no-new-privileges:true"],
    )
    assert ":" in service["image"]


def test_a_worker_has_more_time_to_end_than_its_shutdown_timeout():
    allowed = boot.settings_class().model_fields["shutdown_timeout"].default

    for name in ("worker", "worker-cron"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > int(allowed)


def test_every_password_is_refused_while_it_is_empty_and_is_empty_in_the_example():
    example = re.findall(r"^(\w+_PASSWORD)=$", (FOLDER / ".env.example").read_text(), re.MULTILINE)

    assert set(re.findall(r"\w+_PASSWORD(?=:\?)", COMPOSE)) == set(example)
    assert re.findall(r"\$\{\w+_PASSWORD(?!:\?)", COMPOSE) == []


def test_every_variable_of_compose_is_in_the_example():
    example = (FOLDER / ".env.example").read_text()

    named = set(re.findall(r"\$\{(\w+)", COMPOSE)) - {"USER"}
    assert {name for name in named if not re.search(rf"^#?{name}=", example, re.MULTILINE)} == set()


def test_every_process_has_a_role_and_a_user_with_the_rights_that_the_page_of_security_lists():
    page = (ROOT / "docs" / "security.md").read_text()
    rights = dict(re.findall(r"^ACL SETUSER (\S+) reset on >SECRET (.+)$", page, re.MULTILINE))
    users = dict(
        re.findall(r"^user (\S+) on >\w+_PASSWORD (.+)$", (FOLDER / "redis/users.acl").read_text(), re.MULTILINE)
    )
    roles = set(
        re.findall(r"create role (\S+) login", "".join(file.read_text() for file in FOLDER.glob("postgres/*.sql")))
    )
    urls = [
        value for service in OURS.values() for name, value in service["environment"].items() if name.endswith("_URL")
    ]

    # `check` asks for INFO if it may.
    rights["forgekeeper"] += " +info"
    assert users == {user: rights[user] for user in users}
    assert {re.match(r"redis://([\w-]+):", url)[1] for url in urls if url.startswith("redis")} == set(users)
    assert {re.match(r"postgresql://(\w+):", url)[1] for url in urls if url.startswith("postgresql")} == roles


def test_prometheus_scrapes_the_jobs_that_rules_and_dashboards_ask_for():
    def jobs(file):
        return {job["job_name"]: job for job in yaml.safe_load(file.read_text())["scrape_configs"]}

    found = jobs(FOLDER / "prometheus.yml")
    names = [name for job in found.values() for target in job["dns_sd_configs"] for name in target["names"]]

    assert found.keys() == jobs(ROOT / "deploy" / "prometheus.yml").keys()
    assert set(names) <= OURS.keys()


OPTIONAL_SETTINGS = {
    "FORGEKEEPER_WEBHOOK_URL": {"exporter"},
    "FORGEKEEPER_WEBHOOK_SECRET": {"exporter"},
    "FORGEKEEPER_SENTRY_DSN": {"scheduler", "worker", "worker-cron", "exporter"},
}
"""Settings that are empty unless `.env` has them, and the services that get them."""


@every("setting", OPTIONAL_SETTINGS)
def test_an_optional_secret_is_given_to_the_processes_that_use_it_alone(setting):
    assert {name for name, service in OURS.items() if setting in service["environment"]} == OPTIONAL_SETTINGS[setting]


@every("name", OURS)
def test_without_their_variables_webhook_sentry_and_traces_are_off(name, monkeypatch):
    lines = "".join((ROOT / path).read_text() for path in OURS[name]["env_file"])
    with monkeypatch.context() as process:
        for setting, value in {
            **dict(re.findall(r"^(\w+)=(.*)$", lines, re.MULTILINE)),
            **OURS[name]["environment"],
        }.items():
            process.setenv(setting, value)
        settings = boot.load_settings()

    assert (settings.webhook_url, settings.webhook_secret, settings.sentry_dsn, settings.tracing) == (
        *(None, None, None),
        "off",
    )


def locked(name):
    """Read the packages of a lock file with their versions."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def declared(section, option):
    """Name the packages that a part of setup.cfg requires."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(re.findall(r"^[\w-]+", setup[section][option], re.MULTILINE))


def test_the_image_has_the_packages_of_all_processes_and_no_embedded_servers():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    of_processes = setup["options.extras_require"].keys() - {"embedded", "test", "bench"}
    required = set().union(*(declared("options.extras_require", extra) for extra in of_processes))

    assert required | declared("options", "install_requires") <= locked("image").keys()
    assert not declared("options.extras_require", "embedded") & locked("image").keys()
    (lock,) = re.findall(r"(--extra .*)-o requirements/image.txt", (ROOT / "Makefile").read_text())
    assert set(re.findall(r"--extra (\w+)", lock)) == of_processes


def test_the_image_has_the_versions_of_the_tests():
    assert locked("image").items() <= (locked("demo") | locked("test")).items()


def test_the_image_installs_nothing_without_a_hash():
    lock = (ROOT / "requirements" / "image.txt").read_text()
    containerfile = (ROOT / "Containerfile").read_text()

    assert re.search(
        r"^COPY requirements/image.txt (\S+)$(?s:.*)install .*--require-hashes -r \1$", containerfile, re.MULTILINE
    )
    assert re.findall(r"^[\w.-]+==[^\n]*[^\\]$", lock, re.MULTILINE) == []
