"""Each text of the console can be translated, and has a translation in each language."""

import ast
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.extract import DEFAULT_KEYWORDS, extract_from_dir
from babel.messages.pofile import read_po
from jinja2 import nodes

from forgekeeper.cli.console import languages
from forgekeeper.cli.console.template_environments import create_environments
from forgekeeper.cli.console.template_filters import SHAPES_BY_STATE

CONSOLE = Path(languages.__file__).parent
ENVIRONMENT = create_environments()["en"]
TRANSLATING = {"_", "gettext", "ngettext", "pgettext", "TranslatableText"}
"""Functions whose constants are messages."""
TRANSLATED = [language for language in languages.LANGUAGES if language != languages.DEFAULT_LANGUAGE]
MARK = re.compile(r'%\(\w+\)s|<[^>]+>|["<&]')
"""Parts that a translation has to keep: placeholders and HTML."""
ENGLISH = re.compile(r"[A-Za-z]{2} | [A-Za-z]{2}|[A-Z][a-z]")
"""A text of several words, or that begins like a sentence; names of fields and formats of numbers do not."""
SENTENCE = re.compile(r"[a-z]+ [a-z]+ [a-z]+")
SPARED = re.compile(r"\bAPI\b|addresses$|tokens?\b|^console login|-src|--dry-run|^audit of run|^a pause or stop$")
"""Texts of the API, of the log, of headers, and parts of sentences of the commands, which are English."""
NAMES = {"forgekeeper", "UTC"}
FOR_COMMANDS = {"command", "named_lines", "token_command", "tokens", "users"}
"""Modules whose texts are for the command line."""


def read_catalog(language):
    with (languages.CATALOG_FOLDER / f"{language}.po").open("rb") as file:
        return read_po(file)


@cache
def extract_messages():
    found, methods = Catalog(), [("templates/**.html", "jinja2.ext:babel_extract"), ("**.py", "python")]
    keywords, options = DEFAULT_KEYWORDS | {"TranslatableText": None}, {"templates/**.html": {"silent": "false"}}
    for _, _, message, _, context in extract_from_dir(CONSOLE, methods, options, keywords):
        found.add(message, context=context)
    for state in SHAPES_BY_STATE:
        found.add(state, context="state")
    return found


def list_messages(catalog):
    """Return the messages without the header, by their context and English text."""
    return {(one.context, one.id): one for one in catalog if one.id}


@pytest.mark.parametrize("language", TRANSLATED)
def test_each_text_has_a_translation_and_the_catalog_has_no_other_text(language):
    needed, known = list_messages(extract_messages()), list_messages(catalog := read_catalog(language))

    assert needed.keys() ^ known.keys() == set()
    assert [one.id for one in known.values() if one.fuzzy or not one.string or not all(one.string)] == []
    assert catalog.obsolete == {}


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_translation_has_the_placeholders_and_the_html_of_its_text(language):
    pairs = {one.id: one.string for one in list_messages(read_catalog(language)).values()}

    # Of a plural, the form for many has all of them.
    texts = [(one[-1], other[-1]) if isinstance(one, tuple) else (one, other) for one, other in pairs.items()]
    assert [one for one, other in texts if Counter(MARK.findall(one)) != Counter(MARK.findall(other))] == []


class TextFinder(HTMLParser):
    """Collects the texts of a template that a reader sees or hears, without those in `code` and `pre`."""

    def __init__(self, html):
        super().__init__()
        self.texts, self._open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.texts += [value for name, value in attrs if name in {"aria-label", "title", "alt"} and value]

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"code", "pre"} & set(self._open):
            self.texts.append(data)


@pytest.mark.parametrize("name", ENVIRONMENT.list_templates())
def test_a_template_has_no_text_that_is_not_translated(name):
    tree = ENVIRONMENT.parse(ENVIRONMENT.loader.get_source(ENVIRONMENT, name)[0])
    shown = TextFinder("".join(part.data for part in tree.find_all(nodes.TemplateData))).texts
    calls = [one for one in tree.find_all(nodes.Call) if getattr(one.node, "name", None) in TRANSLATING]
    translated = {id(constant) for call in calls for constant in call.find_all(nodes.Const)}
    constants = [one.value for one in tree.find_all(nodes.Const) if id(one) not in translated]

    assert {word for text in shown for word in re.findall(r"[A-Za-z]{2,}", text)} - NAMES == set()
    assert [one for one in constants if isinstance(one, str) and ENGLISH.search(one)] == []


@pytest.mark.parametrize("module", sorted(CONSOLE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_of_the_pages_has_no_sentence_that_is_not_translated(module):
    if module.stem in FOR_COMMANDS:
        return
    tree = ast.parse(module.read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    # A docstring is an expression, and what is logged is for people at a terminal.
    spared = [one for one in ast.walk(tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    spared += [one for one in calls if ast.unparse(one.func) in {*TRANSLATING, "log.warning", "log.info"}]
    known = {id(part) for one in spared for part in ast.walk(one)}
    found = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and id(one) not in known]

    sentences = [one for one in found if isinstance(one, str) and SENTENCE.search(one)]
    assert [one for one in sentences if not SPARED.search(one)] == []
