"""Implementation of the command `adopt`."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import Problem, print_answer, print_json, write_line, wrong_use
from forgekeeper.platform.database import database
from forges import adoption
from models import FORGE_MODELS

FORGE_CHOICES = ("forgejo", "gitea", "gitlab")
FORGE_ALIASES = {"gitea": "forgejo"}
"""Forges that share the tables of another forge."""
INDEX_HINT = (
    "runs are slow without these indexes; execute the statements in this order, also while the forge is running:"
)
SELECT_AUDIT_PRIVILEGE = "select coalesce(has_table_privilege(to_regclass('audit_acts'), 'insert'), false)"


def create_views(forge: str, *, print_: bool, role: str | None, tables: str, json: bool) -> None:
    """Create the views, or print their SQL; the command `adopt` explains the arguments."""
    if forge not in FORGE_CHOICES:
        wrong_use(f"there is no forge {forge!r}; there are: {', '.join(FORGE_CHOICES)}")
    with connect_command("adopt", migrated=False, redis_needed=False) as settings:
        try:
            kind = import_module(f"forges.{FORGE_ALIASES.get(forge, forge)}.adoption").ADOPTION_CLASS
            found = adoption.plan_adoption(kind, tables, settings.forge_schema, role)
            if not print_:
                adoption.require_owner(found)
        except adoption.AdoptionRefused as unfit:
            raise Problem(str(unfit)) from None
        script, advice = "\n".join(found.write_statements()), list(found.find_missing_indexes())
        if print_:
            _print_script(script, advice, json=json)
            return
        _execute_script(found, script)
        said = "\n".join(_describe_adoption(found, advice))
    facts: dict[str, Any] = {"forge": forge, "tables": tables, "views": found.views, "role": role, "indexes": advice}
    facts["left_out"] = [
        {"why": why, "views": views, "blocks": _find_blocked(views)} for why, views in _list_left_out(found).items()
    ]
    print_answer(facts, said, json=json)


def _print_script(script: str, advice: list[str], *, json: bool) -> None:
    hints = [f"-- {line}" for line in [INDEX_HINT, *advice]] if advice else []
    text = "\n".join(["begin;", script, "commit;", *hints])
    if json:
        print_json({"sql": text})
    else:
        write_line(text)


def _execute_script(found: adoption.Adoption, script: str) -> None:
    with database.atomic():
        # Before the first `migrate` the audit does not exist, and the tables' owner may lack rights on it.
        (recorded,) = database.execute_sql(SELECT_AUDIT_PRIVILEGE).fetchone()
        if recorded:
            acts.record_act("adopt", found.views, after={"tables": found.tables, "role": found.role})
        # The driver interprets a single % as a placeholder.
        database.execute_sql(script.replace("%", "%%"))


def _list_left_out(found: adoption.Adoption) -> dict[str, list[str]]:
    """Return views that are not created, by reason; also views without any table of the forge."""
    known = {view for part in found.every_part for view in part.views}
    unknown = [model._meta.table_name for model in FORGE_MODELS if not model.optional]
    without = [view for view in unknown if view not in known]
    return found.left_out | ({f"{found.display_name} has no such tables": without} if without else {})


def _find_blocked(views: Collection[str]) -> list[str]:
    """Return the batches that are blocked without these views."""
    return [
        batch.name
        for batch in BATCHES.values()
        if any(one.model._meta.table_name in views and not one.model.optional for one in batch.relations)
    ]


def _describe_adoption(found: adoption.Adoption, advice: list[str]) -> list[str]:
    said = [f"the views are in schema {found.views}"]
    if found.role is None:
        said[0] += "; no role was granted rights, --role names a role"
    said += found.report_limits()
    for why, views in _list_left_out(found).items():
        blocks = ", ".join(_find_blocked(views))
        which = f"without them these batches are blocked: {blocks}" if blocks else "no batch needs them"
        said.append(f"not adopted, because {why}: {', '.join(views)}; {which}")
    return said + ([INDEX_HINT, *advice] if advice else [])
