"""The site of the documentation has every page once, by its kind, as the forge shows it, and needs no other host."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.harness.every import every
from tests.harness.site import ROOT, build_site, require_mkdocs, write_sources
from website.prepare_pages import PAGES_OUTSIDE_OF_DOCS

DOCS = ROOT / "docs"
SOURCES = {
    **{page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))},
    **{site_path: ROOT / path for path, site_path in PAGES_OUTSIDE_OF_DOCS.items()},
}
"""Path in the site, and the page in the repository."""
DECISIONS = {path for path in SOURCES if re.match(r"adr/(0|superseded)", path)}
"""Pages of one section, whose list is adr/README.md."""
KINDS = {"Tutorials": "a tutorial", "How-to": "a how-to", "Reference": "a reference", "Explanation": "an explanation"}
WITHOUT_KIND = {"changelog.md"}
ELEMENTS = {"li", "td", "pre", "h1", "h2", "h3", "img"}
BROKEN = ("nowhere.md", "preview.md#nowhere", "#nowhere", "../CHANGELOGS.md", "runbooks/")
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements whose address a browser loads with the page."""


class Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml without its references to Python."""


Configuration.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


class Elements(HTMLParser):
    """Counts the elements of the article, and collects the addresses that the page loads."""

    def __init__(self, html):
        super().__init__()
        self.in_article, self.counts, self.addresses = False, Counter(), set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.in_article |= tag == "article"
        if self.in_article and tag in ELEMENTS:
            self.counts[tag] += 1
        self.addresses.add(dict(attributes).get(LOADED.get(tag, "")) or "")

    def handle_endtag(self, tag):
        self.in_article &= tag != "article"


def list_pages(entry):
    """Yield the paths in a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from list_pages(child)


NAVIGATION = yaml.load((ROOT / "website" / "mkdocs.yml").read_text(), Configuration)["nav"]
SECTIONS = [(title, page) for section in NAVIGATION for title, part in section.items() for page in list_pages(part)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    require_mkdocs()
    folder = tmp_path_factory.mktemp("site")
    write_sources(folder)
    built = build_site(folder)
    assert built.status == 0, built.messages
    return built.folder


def read_html(site, path):
    return (site / re.sub(r"README\.md$", "index.md", path)).with_suffix(".html").read_text()


def test_each_page_is_in_the_navigation_once():
    assert Counter(page for _title, page in SECTIONS) == Counter(set(SOURCES) - DECISIONS)


@every("title, page", [(title, page) for title, page in SECTIONS if title in KINDS and page not in WITHOUT_KIND])
def test_a_page_is_in_the_section_of_its_kind(title, page):
    assert f"\n\nThis page is {KINDS[title]} " in SOURCES[page].read_text()


def test_the_site_has_a_file_for_each_page(site):
    assert all(read_html(site, path) for path in SOURCES)


def test_pages_and_styles_load_nothing_from_another_host(site):
    addresses = {address for page in site.rglob("*.html") for address in Elements(page.read_text()).addresses}
    styles = [style.read_text() for style in site.rglob("*.css")]
    addresses |= {address for style in styles for address in re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style)}

    assert len(addresses) > 10
    assert {address for address in addresses if re.match(r"(?:\w+:)?//", address)} == set()


@every("path", SOURCES)
def test_a_page_has_the_lists_tables_and_blocks_that_the_forge_shows(site, path):
    expected = Elements(f"<article>{MarkdownIt().enable('table').render(SOURCES[path].read_text())}</article>")

    assert Elements(read_html(site, path)).counts == expected.counts


def test_the_search_finds_a_heading_of_each_page(site):
    found = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}

    missing = {
        path for path in SOURCES if re.sub(r"README\.md$", "index.md", path).replace(".md", ".html") not in found
    }
    assert missing == set()


def test_each_link_that_leads_nowhere_fails_the_build(tmp_path):
    require_mkdocs()
    page = write_sources(tmp_path) / "forges.md"
    page.write_text(f"{page.read_text()}\n{' '.join(f'[a link]({link})' for link in BROKEN)}\n")

    built = build_site(tmp_path)

    warnings = "".join(line for line in built.messages.splitlines() if line.startswith("WARNING"))
    assert (built.status, {link for link in BROKEN if f"'{link}'" not in warnings}) == (1, set())
