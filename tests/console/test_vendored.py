"""What the console sends to a browser as files: what others wrote is what they published, and colours can be read."""

import re
import tomllib
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "forgekeeper" / "cli" / "console"
STATIC, TEMPLATES = HERE / "static", sorted((HERE / "templates").glob("**/*.html"))
VENDORED = tomllib.loads((STATIC / "vendored.toml").read_text())
CSS = re.sub(r"/\*.*?\*/", "", (STATIC / "console.css").read_text(), flags=re.DOTALL)
PAPERS = ("ground", "paper", "shade")
TONES = ("good", "busy", "warn", "bad")
TEXTS = ("ink", "soft", "accent", *TONES)
READABLE, VISIBLE = 4.5, 3.0
"""The contrast that WCAG AA asks for between a text and what is behind it, and between a shape and what is beside it."""


@pytest.mark.parametrize("name", VENDORED)
def test_a_file_of_others_is_what_they_published(name):
    assert sha256((STATIC / name).read_bytes()).hexdigest() == VENDORED[name]["sha256"]


@pytest.mark.parametrize("name", VENDORED)
def test_a_file_of_others_has_its_licence_beside_it(name):
    assert "Permission to use, copy, modify" in (STATIC / VENDORED[name]["licence_file"]).read_text()


def test_every_script_is_ours_or_named_as_that_of_others():
    assert {one.name for one in STATIC.glob("*.js")} == {"console.js", *VENDORED}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda one: one.name)
def test_a_template_has_nothing_inline_that_the_policy_forbids(template):
    text = template.read_text()

    assert not re.search(r"<style|\sstyle\s*=|\son\w+\s*=|javascript:|hx-on|hx-vars|hx-vals=.js:", text, re.IGNORECASE)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda one: one.name)
def test_a_template_names_no_other_host(template):
    assert not re.search(
        r"""(?:https?:)?//[\w.-]+\.\w""", re.sub(r"\{#.*?#\}", "", template.read_text(), flags=re.DOTALL)
    )


def test_the_style_names_no_other_host():
    assert not re.search(r"@import|url\(\s*[\"']?(?:\w+:)?//", CSS)


def test_every_colour_is_a_property_that_has_one_in_the_dark_too():
    light, dark = schemes()

    assert set(light) == set(dark)
    assert not re.findall(
        r"#[0-9a-fA-F]{3,8}\b|(?:rgb|hsl)a?\(|oklch\(", re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)
    )


def test_every_property_that_is_used_is_there():
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) <= set(re.findall(r"--([\w-]+):", CSS))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_can_be_read_on_all_it_may_lie_on(scheme):
    pairs = [
        *product(TEXTS, PAPERS),
        *product(TEXTS, (f"{tone}-paper" for tone in TONES)),
        ("on-accent", "accent"),
        ("on-bad", "bad"),
    ]

    assert too_low(schemes()[scheme], pairs, READABLE) == {}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_shape_can_be_told_from_what_is_beside_it(scheme):
    assert too_low(schemes()[scheme], product(("edge", "accent", *TONES), PAPERS), VISIBLE) == {}


def schemes():
    """The colours of the light and of the dark scheme, each by the name of its property."""
    return [
        dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})\b", one))
        for one in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    ][:2]


def too_low(colours, pairs, least):
    """The pairs whose contrast is lower than *least*, with it."""
    found = {(above, below): contrast(colours[above], colours[below]) for above, below in pairs}
    return {pair: round(ratio, 2) for pair, ratio in found.items() if ratio < least}


def contrast(one, other):
    """WCAG's contrast ratio of two colours."""
    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def luminance(colour):
    """WCAG's relative luminance."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
