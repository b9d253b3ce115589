"""The examples for systemd start what there is, with settings that there are."""

import itertools
import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
import typer

from forgekeeper.api.batches import list_queues
from forgekeeper.cli.commands import build_application
from forgekeeper.delivery import boot
from forgekeeper.delivery.boot import load_settings
from forgekeeper.platform.settings.secret_files import list_secret_settings
from tests.harness.every import every

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = sorted(FOLDER.glob("*.service"))
EXAMPLE = FOLDER / "forgekeeper.env"
CREDENTIALS = FOLDER / "credentials.conf"


def parsed(unit):
    parser = RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(unit.read_text())
    return parser


def started(service):
    """The words after the program's name."""
    program, *words = parsed(service)["Service"]["ExecStart"].split()
    assert program == "/opt/forgekeeper/bin/forgekeeper"
    return words


@every("service", SERVICES)
def test_a_service_starts_a_command_with_options_that_it_knows(service):
    name, *rest = started(service)
    command = typer.main.get_command(build_application()).commands[name]

    known = {option for parameter in command.params for option in parameter.opts}

    assert {word for word in rest if word.startswith("--")} <= known


def test_the_services_together_are_every_process_and_every_queue():
    words = [started(service) for service in SERVICES]

    consumed = [queue for one in words for option, queue in itertools.pairwise(one) if option == "--queues"]

    assert {one[0] for one in words} == {"scheduler", "worker", "exporter", "console"}
    assert sorted(consumed) == sorted(list_queues())
    assert sorted(parsed(FOLDER / "forgekeeper.target")["Unit"]["Wants"].split()) == [one.name for one in SERVICES]


@every("service", SERVICES)
def test_a_service_comes_back_says_when_it_is_ready_and_has_the_time_to_end_and_no_rights_that_it_does_not_need(
    service,
):
    section, worker = parsed(service)["Service"], "worker" in service.name
    needs = load_settings().shutdown_timeout.total_seconds() if worker else 5

    assert section["Restart"] == "always"
    assert (section["NoNewPrivileges"], section["ProtectSystem"]) == ("yes", "strict")
    # What git replaces has to stay the forge's.
    assert section["User"] == ("git" if "--queues git" in section["ExecStart"] else "forgekeeper")
    assert float(section["TimeoutStopSec"]) >= needs + 10
    assert (section["Type"], section["TimeoutStartSec"], section["WatchdogSec"]) == ("notify", "infinity", "60")
    # A worker's processes say it, the children of the one that was started.
    assert section["NotifyAccess"] == ("all" if worker else "main")


def test_the_example_of_an_environment_can_be_loaded_and_a_shell_reads_it_as_systemd_does():
    names = re.findall(r"^FORGEKEEPER_(\w+)=", EXAMPLE.read_text(), re.MULTILINE)
    script = f'set -a; . {EXAMPLE}; printf %s "$FORGEKEEPER_OBJECT_STORES"'
    shutil.copy(EXAMPLE, ".env")

    said = subprocess.run(["/bin/sh", "-ec", script], capture_output=True, text=True, check=True)

    assert {name.lower() for name in names} <= set(boot.settings_class().model_fields)
    assert load_settings().object_stores.keys() == {"artifacts"}
    assert said.stdout == '{"artifacts": "file:///srv/artifacts"}'


@every("service", SERVICES)
def test_a_service_reads_the_file_of_its_role_after_the_one_that_all_share(service):
    read = re.findall(r"^EnvironmentFile=(.*)$", service.read_text(), re.MULTILINE)

    assert read == ["/etc/forgekeeper/forgekeeper.env", f"-/etc/forgekeeper/{started(service)[0]}.env"]


def test_the_credentials_are_all_settings_with_secrets():
    text = CREDENTIALS.read_text()
    secrets = list_secret_settings(boot.settings_class())

    assert re.findall(r"^#?LoadCredential=(\w+):/etc/forgekeeper/%N/\1$", text, re.MULTILINE) == secrets
    assert re.findall(r"^#?Environment=FORGEKEEPER_(\w+)_FILE=%d/(\w+)$", text, re.MULTILINE) == [
        (name.upper(), name) for name in secrets
    ]


def test_systemd_has_nothing_against_the_units(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in (*SERVICES, FOLDER / "forgekeeper.target"):
        # The program is not where it will be.
        text = unit.read_text().replace("/opt/forgekeeper/bin/forgekeeper", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    for service in SERVICES:
        folder = tmp_path / f"{service.name}.d"
        folder.mkdir()
        shutil.copy(CREDENTIALS, folder)

    said = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.glob("*.*[!d]")))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert [line for line in said.stderr.splitlines() if "forgekeeper" in line] == []
