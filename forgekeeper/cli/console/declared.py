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
from forgekeeper.cli.console.pages import PageRequest, choose_page, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.database import now
from forgekeeper.platform.settings.reading import list_settings

ALERT_RULES_FILE = files("metrics") / "alerts.yml"
RUNBOOKS_FOLDERS = {"en": files("metrics") / "runbooks", "ja": files("metrics") / "runbooks_ja"}
"""Folders of the runbooks by language."""
SETTINGS_PER_PAGE = 40
PAGES_BY_LINK = {"": "", "../alerts.md": "/alerts", "../settings.md": "/settings"}
"""Pages of the console by the link targets of a runbook; "" is the page itself."""
LINK_TO_TRANSLATION = re.compile(r" ?\[(?:English|日本語)\]\([^)]*\)")
"""Link at the head of a runbook to its other language; the console has a button for that."""


@page("/flags", "flags.html", TranslatableText("Flags"))
def show_flags(_asked: PageRequest) -> dict[str, Any]:
    """Show each flag with its batches, its state, and the person who last changed it."""
    return {
        "at": now(),
        "flags": declared.flag_states(),
        "sentences": FLAGS,
        "turned": {row.name: row.updated_at for row in FeatureFlag.select()},
        "acts": lookup.find_latest_acts("flags on", "flags off"),
    }


@page("/settings", "settings.html", TranslatableText("Settings"), query=("find", "given", "page"), live=False)
def show_settings(request: PageRequest) -> dict[str, Any]:
    """Show the settings of this process with their sources, secrets masked.

    ``find`` selects settings by a text in their name or description, ``given`` settings that are not the default.
    """
    text = request.query.get("find", "").casefold()
    found = [
        one
        for one in list_settings(request.settings)
        if text in f"{one.name} {one.sentence}".casefold() and (one.source != "default" or "given" not in request.query)
    ]
    return choose_page(found, request, SETTINGS_PER_PAGE)


@page("/check", "check.html", TranslatableText("Check"), timeout_seconds=15, live=False)
def show_check(request: PageRequest) -> dict[str, Any]:
    """Show the results of `check`, run on the console's machine."""
    return {"at": now(), "findings": list(check.collect_findings(request.settings))}


@page("/alerts", "alerts.html", TranslatableText("Alerts"), live=False)
def show_alerts(_asked: PageRequest) -> dict[str, Any]:
    """Show every alert, by batch, and without a batch the alerts that concern no single batch."""
    rules_by_owner = {name: [rule for rule in read_alert_rules() if name in rule["batches"]] for name in BATCHES}
    rules_by_owner[""] = [rule for rule in read_alert_rules() if not rule["batches"]]
    titles = {name: read_runbook_titles(name) for name in list_runbooks()}
    return {"alerts": {name: some for name, some in rules_by_owner.items() if some}, "runbooks": titles}


@page("/runbooks/{name}", "runbook.html", TranslatableText("Runbook: %(name)s"), live=False)
def show_runbook(request: PageRequest) -> dict[str, Any]:
    """Show the runbook of an alert, in each language."""
    if (name := request.path["name"]) not in list_runbooks():
        names = ", ".join(list_runbooks())
        raise Problem(
            TranslatableText("there is no runbook %(name)s; there are: %(names)s", name=repr(name), names=names)
        )
    # The files are part of the package, and HTML in them is escaped.
    return {"texts": {language: Markup(render_markdown(text)) for language, text in read_runbook(name).items()}}  # noqa: S704


@cache
def read_alert_rules() -> list[dict[str, Any]]:
    """Read the declared alerts, each with its *runbook*'s address and the *batches* it names."""
    owners = {one.name: batch for batch in BATCHES for one in (BATCHES[batch], *BATCHES[batch].children)}
    groups = yaml.safe_load(ALERT_RULES_FILE.read_text("utf-8"))["groups"]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for rule in found:
        rule["batches"] = {owners[word] for word in re.findall(r"\w+", rule["expr"]) if word in owners}
        rule["annotations"] = {name: re.sub(r"{{.*?}}", "…", text) for name, text in rule["annotations"].items()}
        rule["runbook"] = re.sub(r".*/docs/(runbooks/\w+)\.md", r"/\1", rule["annotations"]["runbook_url"])
    return found


@cache
def list_runbooks() -> tuple[str, ...]:
    """Return the names of the runbooks."""
    return tuple(
        sorted(file.name.removesuffix(".md") for file in RUNBOOKS_FOLDERS["en"].iterdir() if file.name.endswith(".md"))
    )


@cache
def read_runbook(name: str) -> dict[str, str]:
    """Read a runbook in each language, without the link to the other language."""
    texts = {language: (folder / f"{name}.md").read_text("utf-8") for language, folder in RUNBOOKS_FOLDERS.items()}
    return {language: LINK_TO_TRANSLATION.sub("", text, count=1).lstrip() for language, text in texts.items()}


def read_runbook_titles(name: str) -> dict[str, str]:
    """Return the heading of a runbook in each language."""
    return {language: text.partition("\n")[0].removeprefix("# ") for language, text in read_runbook(name).items()}


def render_markdown(text: str) -> str:
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
                _rewrite_link(part)
    html: str = reader.renderer.render(tokens, reader.options, {})
    return html.replace("<pre>", '<pre tabindex="0">')


def _rewrite_link(link: Token) -> None:
    """Point the link to the console's page; without such a page, remove its target."""
    file, hash_sign, anchor = str(link.attrs.pop("href")).partition("#")
    pages = PAGES_BY_LINK | {f"{name}.md": f"/runbooks/{name}" for name in list_runbooks()}
    if file in pages:
        link.attrSet("href", f"{pages[file]}{hash_sign}{anchor}")
