"""A forge that lacks a relation: each batch that needs it is blocked, and all commands answer as usual."""

import models
from forgekeeper.api.batches import BATCHES
from tests.harness.every import every
from tests.harness.thorough import select_rows

RELATIONS = [model._meta.table_name for model in models.FORGE_MODELS if not model.optional]
LOOKS = ("status", "quarantine list", "processes", "leases", "audit", "batches", "flags", "ticks prune", "why prune")


def needing(relation):
    """Name the batches that need the relation."""
    return {
        batch.name for batch in BATCHES.values() if relation in {one.model._meta.table_name for one in batch.relations}
    }


@every("relation", select_rows(RELATIONS))
def test_whatever_relation_is_missing_every_command_answers_and_only_its_batches_are_blocked(main, database, relation):
    database.execute_sql(f"alter table {relation} rename to gone")
    try:
        ended = {look: main(*look.split()) for look in LOOKS}
        dry = {name: main("run", name, "--dry-run", "--json") for name in BATCHES}
        shown = main("status", "--json").json["batches"]
    finally:
        database.execute_sql(f"alter table gone rename to {relation}")

    assert {look: one.stderr for look, one in ended.items() if one.status or "Traceback" in one.stderr} == {}
    assert {name for name, one in shown.items() if one["blocked"]} <= needing(relation)
    assert {name for name, one in dry.items() if one.status == 3} == needing(relation)
