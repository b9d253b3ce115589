"""Languages of the console: their catalogs, and the language of a request.

Templates and modules have the English texts, so English needs no catalog.
"""

from __future__ import annotations

import re
from gettext import GNUTranslations, NullTranslations
from io import BytesIO
from pathlib import Path

from babel.core import negotiate_locale
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from starlette.requests import Request

LANGUAGES = {"en": "English", "ja": "日本語"}
"""Languages by their code, with the name that their readers know."""
DEFAULT_LANGUAGE = "en"
LANGUAGE_COOKIE = "forgekeeper_language"
"""Cookie of a browser whose person has chosen a language."""
LANGUAGE_COOKIE_SECONDS = 365 * 86_400
CATALOG_FOLDER = Path(__file__).parent / "translations"
LANGUAGE_RANGE = re.compile(r"([a-z][\w-]*)\s*(?:;\s*q=(\d(?:\.\d*)?))?", re.ASCII)
"""A language of the header Accept-Language, with its weight."""


def read_translations(language: str) -> NullTranslations:
    """Read the catalog of a language; it is compiled in memory, so no file has to be built."""
    if language == DEFAULT_LANGUAGE:
        return NullTranslations()
    with (CATALOG_FOLDER / f"{language}.po").open("rb") as file:
        catalog = read_po(file, locale=language)
    write_mo(compiled := BytesIO(), catalog)
    compiled.seek(0)
    return GNUTranslations(compiled)


def choose_language(request: Request) -> str:
    """Return the language that the person chose, else the first of the browser that is known, else English."""
    if (chosen := request.cookies.get(LANGUAGE_COOKIE)) in LANGUAGES:
        return chosen
    preferred = _list_preferred(request.headers.get("accept-language", ""))
    return negotiate_locale(preferred, LANGUAGES, sep="-") or DEFAULT_LANGUAGE


def _list_preferred(header: str) -> list[str]:
    """Return the languages of an Accept-Language header, the most preferred first."""
    weights = {name: float(weight or 1) for name, weight in LANGUAGE_RANGE.findall(header.lower())}
    return sorted((name for name, weight in weights.items() if weight), key=lambda name: -weights[name])
