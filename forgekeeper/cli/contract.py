"""`contract`: tables, columns and rights that batches need in a forge. Asks no server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.terminal import Json, out, print_json, write_line, wrong_use
from forgekeeper.delivery.boot import load_settings
from forgekeeper.platform.database.relations import PROCESS_KINDS, Relation

LabelledSentences = Iterator[tuple[str, str]]
CONTRACT_PAGE_HEAD = """# Tables that batches need from the forge

This page is a reference for administrators of a forge: tables, columns, rights and indexes that each batch needs.

A relation is a table or a view, in the `search_path` of forgekeeper's connections. It may have more columns. Text may \
be `text` or `character varying`, a whole number of any size. `lock` is `select … for update skip locked`, which needs \
the right to update a column. If the relation is a view, create its index on the table below the view.

A batch is blocked (`schema`) if a relation or a column is missing, a type is wrong, a right is missing, or lookups \
would miss rows ([why](architecture/negative_proofs.md#why-postgresql-misses-rows)); other batches run. \
`forgekeeper check` compares the contract with the database, and examines the plan of each index scan.

`forgekeeper contract --markdown` prints this page; a test compares them.
"""


def contract(
    batch: Annotated[str | None, typer.Option("--batch", help="Only the contract of this batch.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")] = False,
    json: Json = False,
) -> None:
    """Show the forge's tables that each batch needs, with columns, rights, key and indexes.

    A relation is a table or a view.  A batch whose relations or columns are missing is blocked; other batches run.
    `forgekeeper check` compares the contract with the database.
    """
    if markdown and json:
        wrong_use("use --markdown or --json, not both")
    load_settings()
    chosen = [batch_named(batch)] if batch else list(BATCHES.values())
    if json:
        print_json({"batches": {one.name: [contract_facts(each) for each in one.relations] for one in chosen}})
    elif markdown:
        for line in list_page_lines(chosen):
            write_line(line)
    else:
        for one in chosen:
            _print_contract(one)


def contract_facts(relation: Relation) -> dict[str, Any]:
    """Return a relation's contract as JSON facts."""
    return {
        "relation": relation.name,
        "columns": [field._asdict() for field in relation.fields],
        "key": relation.key,
        "optional": relation.model.optional,
        "operations": dict(_list_operations(relation)),
        "grants": {process: needs for process in PROCESS_KINDS if (needs := relation.needed_privileges(process))},
        "indexes": [index.create_statement(relation.name) for index in relation.indexes],
    }


def list_page_lines(batches: Iterable[BatchSpec]) -> Iterator[str]:
    """Yield the lines of the page with these batches' contracts."""
    yield from CONTRACT_PAGE_HEAD.splitlines()
    for batch in batches:
        yield from ("", f"## {batch.name}", batch.sentence)
        if not batch.relations:
            yield from ("", "It needs nothing from the forge.")
        for relation in batch.relations:
            yield from ("", f"### {batch.name}: {relation.name}", "| column | type | may be NULL |", "|---|---|---|")
            for field in relation.fields:
                yield f"| `{field.name}` | {field.type} | {'yes' if field.nullable else 'no'} |"
            yield ""
            yield from (f"* {name}: {said}" for name, said in _describe_relation(relation, code="`"))
            if relation.indexes:
                yield from (
                    "",
                    "```sql",
                    *(f"{index.create_statement(relation.name)};" for index in relation.indexes),
                    "```",
                )


def _print_contract(batch: BatchSpec) -> None:
    out.print(batch.name, style="bold")
    if not batch.relations:
        out.print("    needs nothing from the forge")
    for relation in batch.relations:
        out.print(f"    {relation.name}")
        for field in relation.fields:
            out.print(f"        {field.name}  {field.type}{', may be NULL' if field.nullable else ''}")
        for name, said in _describe_relation(relation, code=""):
            out.print(f"      {name}: {said}")
        for index in relation.indexes:
            out.print(f"      index: {index.create_statement(relation.name)}")


def _describe_relation(relation: Relation, *, code: str) -> LabelledSentences:
    if relation.model.optional:
        yield "optional", "the forge may lack it"
    yield "key", f"{code}{relation.key}{code}, not NULL, unique, with an index"
    if relation.model.partition is not None:
        yield "partitions", f"by {code}{relation.model.partition}{code}, if there are any"
    yield from _list_operations(relation)


def _list_operations(relation: Relation) -> LabelledSentences:
    """Yield the operations of each process on the relation's rows."""
    for process in PROCESS_KINDS:
        if done := relation.list_operations(process):
            yield process, ", ".join(done)
