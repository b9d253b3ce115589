"""Sentences of the product lead to pages of the console, and cells of tables name their columns."""

import pytest

from forgekeeper.cli.console.template_filters import label_cells, link_commands


@pytest.mark.parametrize(
    ("command", "address"),
    [
        ("forgekeeper run stale_imports --dry-run", "/batches/stale_imports/preview"),
        ("forgekeeper release stale_imports --reason ...", "/batches/stale_imports"),
        ("forgekeeper flags on x", "/flags"),
        ("forgekeeper quarantine list --kind child", "/quarantine"),
        ("forgekeeper audit --run 12", "/audit?run=12"),
        ("forgekeeper check", "/check"),
    ],
)
def test_a_command_in_a_sentence_is_a_link_to_the_page_that_does_it(command, address):
    assert f'see <a href="{address}" title="{command}">' in link_commands(f"see `{command}`")


@pytest.mark.parametrize("command", ["forgekeeper check --init", "forgekeeper migrate", "git gc"])
def test_a_command_that_no_page_does_stays_a_command(command):
    assert link_commands(f"run `{command}` first") == f"run <code>{command}</code> first"


def test_a_sentence_from_outside_is_no_markup():
    assert "<script" not in link_commands("`<script>` and <script>")


def test_each_cell_names_its_column_but_one_that_spans_all():
    rows = '<tr><th scope="row">a</th><td class="number">1</td></tr><tr><td colspan="2">none</td></tr>'

    assert label_cells(rows, ["Name", "#Size"]) == (
        '<tr role="row"><th role="rowheader" data-column="Name" scope="row">a</th>'
        '<td role="cell" data-column="Size" class="number">1</td></tr>'
        '<tr role="row"><td role="cell" colspan="2">none</td></tr>'
    )
