"""Each Japanese page has the parts of its English original that a machine can compare.

A translation that lags behind fails here: change the Japanese page together with the English page.
"""

import os
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

from markdown_it import MarkdownIt

from tests.harness.every import every

ROOT = Path(__file__).parents[2]
DOCS, JAPANESE = ROOT / "docs", ROOT / "docs" / "ja"
PAIRS = {ROOT / "README.ja.md": ROOT / "README.md"} | {
    page: DOCS / page.relative_to(JAPANESE) for page in sorted(JAPANESE.rglob("*.md"))
}
"""The English original of each Japanese page."""
TRANSLATED = (
    {english: japanese for japanese, english in PAIRS.items()}
    | {DOCS / folder.relative_to(JAPANESE): folder for folder in JAPANESE.rglob("*/")}
    | {picture.with_name(picture.name.replace("_ja.", ".")): picture for picture in DOCS.rglob("*_ja.png")}
)
"""The Japanese page, folder or picture of each English page, folder or picture that has one."""
ORIGINALS = {japanese: english for english, japanese in TRANSLATED.items()}
FENCE = re.compile(r"^ *```\w*\n.*?^ *```$", re.MULTILINE | re.DOTALL)
ITEM = r" *(?:[*-]|\d+\.) "
LINK = re.compile(r"\]\(([^)#]*)(?:#[^)]*)?\)")
KINDS = "チュートリアル|手順書|リファレンス|解説"


def read_prose(page):
    """Read the page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def read_plain(page):
    """Read the prose without code in backquotes and without targets of links."""
    return re.sub(r"\]\([^)]*\)|<[^>]+>", "]", re.sub(r"`[^`]+`", "", read_prose(page)))


def list_code(page):
    """List each line of the page's blocks of code twice: as the mark to compare, and to show."""
    return [(line, line) for block in FENCE.findall(page.read_text()) for line in block.splitlines()]


def list_spans(page):
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", read_prose(page))]


def list_lines(page, mark):
    """List each line of the page that begins with the pattern *mark*, after the text that matches."""
    matches = (re.match(mark, line) for line in read_prose(page).splitlines())
    return [(match[0], match.string) for match in matches if match]


def list_rows(page):
    """List each row of the page's tables, after the number of its cells."""
    return [(line.count("|") - 1, line) for line in read_prose(page).splitlines() if line.startswith("|")]


def find_first_difference(english, japanese):
    """Name the first two lines with different marks, or return None."""
    for (theirs, original), (ours, line) in zip_longest(english, japanese, fillvalue=(None, "nothing")):
        if theirs != ours:
            return f"Japanese: {line}, English: {original}"
    return None


def list_targets(page):
    """List the files and addresses that the page links to, except its own translation or original."""
    own = {PAIRS.get(page), TRANSLATED.get(page)}
    found = [link for link in LINK.findall(read_prose(page)) if link]
    return [link if ":" in link else resolve(page, link) for link in found if resolve(page, link) not in own]


def resolve(page, link):
    return Path(os.path.normpath(page.parent / link))


def list_originals(page):
    """List the targets of the page; a Japanese page or folder counts as its original."""
    return [str(ORIGINALS.get(target, target)) for target in list_targets(page)]


def list_numbers(page):
    """List the numbers of the page; a million is a hundred of the Japanese unit 万."""
    text = re.sub(r"(\d+) million", lambda match: str(100 * int(match[1])), read_plain(page))
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def compare(english, japanese):
    """Name the items that only one of the pages has."""
    ours, theirs = Counter(japanese), Counter(english)
    return "\n".join(
        [f"only in Japanese: {one}" for one in ours - theirs] + [f"only in English: {one}" for one in theirs - ours]
    )


every_pair = every("japanese, english", PAIRS.items(), name=lambda pair: str(pair[0].relative_to(ROOT)))


@every_pair
def test_each_japanese_page_has_an_original(japanese, english):
    assert english.exists(), f"{english} does not exist"


@every_pair
def test_a_japanese_page_begins_with_a_link_to_its_original(japanese, english):
    assert japanese.read_text().splitlines()[0] == f"[English]({os.path.relpath(english, japanese.parent)})"


@every_pair
def test_an_original_links_to_its_japanese_page_in_its_first_lines(japanese, english):
    assert f"[日本語]({os.path.relpath(japanese, english.parent)})" in "".join(english.read_text().splitlines()[:5])


@every_pair
def test_a_japanese_page_names_its_kind_after_its_title(japanese, english):
    assert re.match(rf"\[English\]\S+\n\n# .+\n\nこのページは、.*?(?:{KINDS})です。", japanese.read_text())


@every_pair
def test_a_japanese_page_has_the_blocks_of_code_of_its_original(japanese, english):
    assert find_first_difference(list_code(english), list_code(japanese)) is None


@every_pair
def test_a_japanese_page_has_the_words_in_backquotes_of_its_original(japanese, english):
    assert compare(list_spans(english), list_spans(japanese)) == ""


@every_pair
def test_a_japanese_page_has_the_headings_of_its_original(japanese, english):
    assert find_first_difference(list_lines(english, "#+ "), list_lines(japanese, "#+ ")) is None


@every_pair
def test_a_japanese_page_has_the_rows_of_the_tables_of_its_original(japanese, english):
    assert find_first_difference(list_rows(english), list_rows(japanese)) is None


@every_pair
def test_a_japanese_page_has_the_list_items_of_its_original(japanese, english):
    assert find_first_difference(list_lines(english, ITEM), list_lines(japanese, ITEM)) is None


@every_pair
def test_a_japanese_page_has_the_links_of_its_original(japanese, english):
    assert compare(list_originals(english), list_originals(japanese)) == ""


@every_pair
def test_a_japanese_page_has_each_number_of_its_original(japanese, english):
    missing = Counter(list_numbers(english)) - Counter(list_numbers(japanese))

    assert ", ".join(missing) == ""


@every_pair
def test_a_japanese_page_links_to_japanese_pages_if_they_exist(japanese, english):
    missed = [str(target.relative_to(ROOT)) for target in list_targets(japanese) if target in TRANSLATED]

    assert ", ".join(missed) == ""


@every_pair
def test_no_emphasis_of_a_japanese_page_is_shown_as_asterisks(japanese, english):
    tokens = MarkdownIt("commonmark").enable("table").parse(japanese.read_text())
    texts = [child.content for token in tokens for child in token.children or () if child.type == "text"]

    assert [text for text in texts if "*" in text] == []
