"""Jinja's environments: one for each language, because its functions of gettext are global in an environment."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.console.languages import LANGUAGES, read_translations
from forgekeeper.cli.console.template_filters import create_filters
from forgekeeper.cli.console.texts import translate_text
from forgekeeper.ledger.heartbeats import read_version

TEMPLATE_FOLDER = Path(__file__).parent / "templates"


def create_environments() -> dict[str, Environment]:
    """Create the environment of each language."""
    return {language: _create_environment(language) for language in LANGUAGES}


def _create_environment(language: str) -> Environment:
    translations = read_translations(language)
    # Every value is escaped, and a missing name is an error.
    made = Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.i18n"],
        finalize=partial(translate_text, translations),
    )
    made.install_gettext_translations(translations, newstyle=True)  # type: ignore[attr-defined]  # of the extension
    made.filters.update(create_filters(translations))
    made.globals.update(batches=BATCHES, version=read_version(), trouble=None, live=False)
    made.globals.update(language=language, languages=LANGUAGES)
    return made
