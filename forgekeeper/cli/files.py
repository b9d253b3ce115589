"""The command `files`: write files for operators from the installed package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files as files_of
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from forgekeeper.cli.terminal import Json, Problem, print_answer, wrong_use

RUNBOOK_URL = re.compile(r"https://forgekeeper\.example/docs/runbooks/(\w+)\.md")
ALERTS_PAGE_URL = "https://forgekeeper.example/docs/alerts.md"
EXAMPLE_GRAFANA_URL = "https://grafana.example"
COMPOSE_BUILD_LINE = re.compile(r"^ +build: .*Containerfile.*\n", re.MULTILINE)
"""Line of compose.yaml that needs a checkout; without it, compose uses the image's name."""


def files(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for the files; it is created.")],
    console: Annotated[
        str | None, typer.Option("--console", metavar="URL", help="Your console: alerts link to its runbooks.")
    ] = None,
    grafana: Annotated[
        str | None, typer.Option("--grafana", metavar="URL", help="Your Grafana: alerts link to its dashboards.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
    json: Json = False,
) -> None:
    """Write units, compose file, Helm chart, alert rules, dashboards and examples for Prometheus and Alertmanager.

    Rules and dashboards get the addresses of your console and your Grafana in place of examples. If a file exists and
    differs, nothing is written and the status is 1; --force replaces such files.
    """
    for option, url in (("--console", console), ("--grafana", grafana)):
        if url is not None and not re.match(r"https?://[^/\s]", url):
            wrong_use(f"{option} takes an address such as https://host.example, not {url!r}")
    texts = {name: _replace_addresses(text, console, grafana) for name, text in _find_files()}
    differ = [name for name, text in texts.items() if _read_if_exists(folder / name) not in (None, text)]
    if differ and not force:
        raise Problem(f"{len(differ)} files in {folder} differ, first {differ[0]}: --force replaces them")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print_answer({"folder": str(folder), "files": sorted(texts)}, f"{len(texts)} files are in {folder}", json=json)


def _find_files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file, in the layout of the project."""
    product = files_of("forgekeeper")
    yield "metrics/alerts.yml", (files_of("metrics") / "alerts.yml").read_text(encoding="utf-8")
    yield "compose.yaml", COMPOSE_BUILD_LINE.sub("", (product / "compose.yaml").read_text(encoding="utf-8"))
    yield from _walk_folder(product / "deploy", "deploy")


def _walk_folder(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _walk_folder(entry, f"{name}/{entry.name}")
        else:
            yield f"{name}/{entry.name}", entry.read_text(encoding="utf-8")


def _replace_addresses(text: str, console: str | None, grafana: str | None) -> str:
    """Replace the example addresses by the operator's."""
    if console is not None:
        text = RUNBOOK_URL.sub(lambda found: f"{console.rstrip('/')}/runbooks/{found[1]}", text)
        text = text.replace(ALERTS_PAGE_URL, f"{console.rstrip('/')}/alerts")
    return text if grafana is None else text.replace(EXAMPLE_GRAFANA_URL, grafana.rstrip("/"))


def _read_if_exists(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
