"""Flags, settings, findings, alerts and runbooks, as the commands and the documentation have them."""

import json
import re
import subprocess
import sys
from itertools import product

import pytest
from markupsafe import Markup

from forgekeeper.api.batches import FLAGS, FeatureFlag
from forgekeeper.audit import acts
from forgekeeper.cli.console import declared
from forgekeeper.cli.console.languages import LANGUAGES
from forgekeeper.cli.console.template_filters import link_commands
from tests.harness.every import every
from tests.harness.html import read_rows
from tests.harness.programs import ROOT
from tests.harness.rules import RULES
from tests.harness.thorough import whole_only

SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.usefixtures("database")


def test_every_flag_is_shown_with_what_it_switches_and_who_turned_it_last_and_why(seen):
    name, *others = FLAGS
    for on in (False, True):
        FeatureFlag.turn(name, on=on)
        with acts.recording_acts(on=True, actor=f"person-{on}", reason=f"because {on}"):
            acts.record_act(f"flags {'on' if on else 'off'}", name)

    shown = {row[0]: row for row in read_rows(seen("/flags").text)}

    assert [shown[name][place] for place in (1, 2, 4, 5)] == ["✓ on", FLAGS[name], "person-True", "because True"]
    assert all(shown[other][1].endswith("off") for other in others)
    assert [shown[other][2:5] for other in others] == [[FLAGS[other], "never", ""] for other in others]


def test_scripts_in_who_turned_a_flag_and_why_are_escaped(seen):
    with acts.recording_acts(on=True, actor=SCRIPT, reason=SCRIPT):
        acts.record_act("flags on", next(iter(FLAGS)))

    text = seen("/flags").text

    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("query", "expected"),
    [("find=no+such+words", set()), ("find=object_grace", {"FORGEKEEPER_OBJECT_GRACE"}),
     ("find=grace&given=on", {"FORGEKEEPER_OBJECT_GRACE"})],
)  # fmt: skip
def test_settings_are_found_by_a_text_and_by_who_has_set_them(seen, query, expected):
    shown = {row[0] for row in read_rows(seen(f"/settings?{query}", object_grace=99).text)}

    assert shown == (expected or {"There is no such setting."})


def test_every_setting_is_shown_with_where_it_comes_from(seen):

    shown = {row[0]: row for row in read_rows(seen("/settings", object_grace=99).text)}

    assert shown["FORGEKEEPER_OBJECT_GRACE"][1] == "99"
    assert shown["FORGEKEEPER_OBJECT_GRACE"][3] == "environment"
    assert shown["FORGEKEEPER_AUDIT"][3] == "default"


@whole_only
def test_no_secret_of_a_setting_is_in_any_page(seen):
    secret = "hunter2hunter2"
    store = f"s3://bucket?access_key_id=a&secret_access_key={secret}"
    given = {"redis_url": f"redis://forge:{secret}@127.0.0.1:1/0", "object_stores": json.dumps({"artifacts": store})}

    assert "artifacts: s3://bucket" in seen("/settings", **given).text
    for path in ("/settings", "/check", "/flags", "/leases", "/processes"):
        assert secret not in seen(path, **given).text


@whole_only
def test_the_page_shows_the_findings_of_the_command(seen):
    command = [sys.executable, "-m", "forgekeeper.cli", "check", "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    shown = read_rows(seen("/check").text)

    found = [tuple(one.values()) for one in json.loads(said)["findings"]]
    assert [(level.split()[-1], *rest) for level, *rest in shown] == [
        (level, subject, Markup(link_commands(message)).striptags()) for level, subject, message in found
    ]


def test_a_check_leaves_the_console_its_connections(seen):

    assert [seen(path).status for path in ("/check", "/", "/check?again=1", "/flags")] == [200] * 4


def test_every_alert_is_shown_with_a_link_to_its_part_of_a_runbook(seen):
    text = seen("/alerts").text

    found = dict(re.findall(r'<a href="/runbooks/([\w]+#[\w-]+)">(\w+)</a>', text))
    parts = {
        part
        for name in declared.list_runbooks()
        for part in re.findall(r'<h3 id="([^"]+)"', seen(f"/runbooks/{name}").text)
    }

    assert {rule["alert"] for rule in RULES if "alert" in rule} == set(found.values())
    assert "{{" not in text
    assert {link.partition("#")[2] for link in found} <= parts


def test_an_alert_about_a_child_is_one_of_its_batch():
    (rule,) = [rule for rule in declared.read_alert_rules() if rule["alert"] == "GitRefCleanupDeadLetters"]

    assert rule["batches"] == {"git_ref_cleanup"}


@every("language, name", product(LANGUAGES, declared.list_runbooks()))
def test_a_runbook_has_no_broken_link_and_its_headings_below_that_of_the_page(language, name):
    text = declared.render_markdown(declared.read_runbook(name)[language])

    assert "<h1" not in text
    for link in re.findall(r'href="([^"]*)"', text):
        page, _, anchor = link.partition("#")
        assert page in {"/alerts", "/settings", *(f"/runbooks/{one}" for one in declared.list_runbooks())}, link
        if anchor:
            other = declared.render_markdown(declared.read_runbook(page.rpartition("/")[2])[language])
            assert f'id="{anchor}"' in other


def test_a_link_to_what_is_no_page_here_is_its_words_alone():
    assert declared.render_markdown("See [the *backup*](../backup.md), and [x](javascript:y).").strip() == (
        "<p>See <a>the <em>backup</em></a>, and [x](javascript:y).</p>"
    )


def test_a_column_of_numbers_brings_no_style():
    assert "style" not in declared.render_markdown("| a | b |\n|--:|---|\n| 1 | 2 |")


def test_html_in_a_runbook_is_escaped():
    assert "<script>" not in declared.render_markdown(f"{SCRIPT}\n\n# {SCRIPT}\n\n`{SCRIPT}`")


@pytest.mark.parametrize("name", ["sock", "..%2F..%2Fsetup.cfg", "%2e%2e%2fbackup", "buckets.md", "%00"])
def test_a_runbook_of_an_unknown_name_is_missing(seen, name):
    assert seen(f"/runbooks/{name}").status == 404
