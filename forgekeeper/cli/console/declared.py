"""Pages of declarations: flags, settings, checks, alerts and runbooks."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from forgekeeper.api.batches import BATCHES, FLAGS, FeatureFlag
from forgekeeper.audit import lookup
from forgekeeper.cli import check, declared
from forgekeeper.cli.console.pages import Asked, choose_page, page
from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.database import now
from forgekeeper.platform.settings.reading import describe

RULES = files("metrics") / "alerts.yml"
RUNBOOKS = files("metrics") / "runbooks"
SETTINGS_PER_PAGE = 40
PAGES = {"": "", "../alerts.md": "/alerts", "../settings.md": "/settings"}
"""Pages of the console by the link targets of a runbook; "" is the page itself."""


@page("/flags", "flags.html", "Flags")
def flags(_asked: Asked) -> dict[str, Any]:
    """Show each flag with its batches, its state, and the person who last changed it."""
    return {
        "at": now(),
        "flags": declared.flag_states(),
        "sentences": FLAGS,
        "turned": {row.name: row.updated_at for row in FeatureFlag.select()},
        "acts": lookup.latest("flags on", "flags off"),
    }


@page("/settings", "settings.html", "Settings", query=("find", "given", "page"), live=False)
def settings(asked: Asked) -> dict[str, Any]:
    """Show the settings of this process with their sources, secrets masked.

    ``find`` selects settings by a text in their name or description, ``given`` settings that are not the default.
    """
    text = asked.query.get("find", "").casefold()
    found = [
        one
        for one in describe(asked.settings)
        if text in f"{one.name} {one.sentence}".casefold() and (one.source != "default" or "given" not in asked.query)
    ]
    return choose_page(found, asked, SETTINGS_PER_PAGE)


@page("/check", "check.html", "Check", patience=15, live=False)
def checked(asked: Asked) -> dict[str, Any]:
    """Show the results of `check`, run on the console's machine."""
    return {"at": now(), "findings": list(check.findings(asked.settings))}


@page("/alerts", "alerts.html", "Alerts", live=False)
def alerts(_asked: Asked) -> dict[str, Any]:
    """Show every alert, by batch, and alerts that concern no single batch."""
    of = {name: [rule for rule in rules() if name in rule["batches"]] for name in BATCHES}
    of["every batch, and the installation"] = [rule for rule in rules() if not rule["batches"]]
    return {"alerts": {name: some for name, some in of.items() if some}, "runbooks": runbooks()}


@page("/runbooks/{name}", "runbook.html", "Runbook: {name}", live=False)
def runbook(asked: Asked) -> dict[str, Any]:
    """Show the runbook of an alert."""
    if (name := asked.path["name"]) not in runbooks():
        raise Problem(f"there is no runbook {name!r}; there are: {', '.join(runbooks())}")
    # The file is part of the package, and HTML in it is escaped.
    return {"text": Markup(rendered((RUNBOOKS / f"{name}.md").read_text("utf-8")))}  # noqa: S704


@cache
def rules() -> list[dict[str, Any]]:
    """Read the declared alerts, each with its *runbook*'s address and the *batches* it names."""
    owners = {one.name: batch for batch in BATCHES for one in (BATCHES[batch], *BATCHES[batch].children)}
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for rule in found:
        rule["batches"] = {owners[word] for word in re.findall(r"\w+", rule["expr"]) if word in owners}
        rule["annotations"] = {name: re.sub(r"{{.*?}}", "…", text) for name, text in rule["annotations"].items()}
        rule["runbook"] = re.sub(r".*/docs/(runbooks/\w+)\.md", r"/\1", rule["annotations"]["runbook_url"])
    return found


@cache
def runbooks() -> tuple[str, ...]:
    """Return the names of the runbooks."""
    return tuple(sorted(file.name.removesuffix(".md") for file in RUNBOOKS.iterdir() if file.name.endswith(".md")))


def rendered(text: str) -> str:
    """Render Markdown as HTML: lowered headings, no styles, and links to our own pages."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    for place, token in enumerate(tokens):
        token.attrs.pop("style", None)
        if token.type in {"heading_open", "heading_close"}:
            token.tag = f"h{int(token.tag[1]) + 1}"
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^\w\- ]", "", tokens[place + 1].content.lower()).replace(" ", "-"))
        for part in token.children or ():
            if part.type == "link_open":
                _lead(part)
    html: str = reader.renderer.render(tokens, reader.options, {})
    return html.replace("<pre>", '<pre tabindex="0">')


def _lead(link: Token) -> None:
    """Point the link to the console's page; without such a page, remove its target."""
    file, hash_sign, anchor = str(link.attrs.pop("href")).partition("#")
    pages = PAGES | {f"{name}.md": f"/runbooks/{name}" for name in runbooks()}
    if file in pages:
        link.attrSet("href", f"{pages[file]}{hash_sign}{anchor}")
