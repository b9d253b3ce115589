"""What the command `adopt` does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import Problem, answer, emit, write, wrong_use
from forgekeeper.database import database
from forges.gitlab import adoption, indexes

FORGES = ("gitlab",)
RECORDED = "select coalesce(has_table_privilege(to_regclass('audit_acts'), 'insert'), false)"


def make_views(forge: str, *, print_: bool, role: str | None, tables: str, json: bool) -> None:
    """Make the views, or print their SQL; the command `adopt` says what the arguments mean."""
    if forge not in FORGES:
        wrong_use(f"there is no forge {forge!r}; there are: {', '.join(FORGES)}")
    with connected("adopt", migrated=False, redis_needed=False) as settings:
        try:
            found = adoption.fit(tables, settings.forge_schema, role)
            if not print_:
                adoption.insist_on_owner(found)
        except adoption.Unfit as unfit:
            raise Problem(str(unfit)) from None
        script, advice = "\n".join(found.statements()), list(indexes.missing(found))
        if print_:
            _print(script, advice, json=json)
            return
        _execute(found, script)
        said = "\n".join(_said(found, advice))
    facts: dict[str, Any] = {"forge": forge, "tables": tables, "views": found.views, "role": role, "indexes": advice}
    facts["left_out"] = [
        {"why": why, "views": views, "blocks": _find_blocked(views)} for why, views in found.left_out.items()
    ]
    answer(facts, said, json=json)


def _print(script: str, advice: list[str], *, json: bool) -> None:
    hints = [f"-- {line}" for line in [indexes.HINT, *advice]] if advice else []
    text = "\n".join(["begin;", script, "commit;", *hints])
    if json:
        emit({"sql": text})
    else:
        write(text)


def _execute(found: adoption.Adoption, script: str) -> None:
    with database.atomic():
        # Before the first `migrate` there is no audit, and the owner of a forge's tables need not have rights on it.
        (recorded,) = database.execute_sql(RECORDED).fetchone()
        if recorded:
            acts.record("adopt", found.views, after={"tables": found.tables, "role": found.role})
        # The driver takes a lone % for the place of a value.
        database.execute_sql(script.replace("%", "%%"))


def _find_blocked(views: Collection[str]) -> list[str]:
    """Name the batches that are blocked without these views."""
    return [
        batch.name
        for batch in BATCHES.values()
        if any(one.model._meta.table_name in views and not one.model.optional for one in batch.relations)
    ]


def _said(found: adoption.Adoption, advice: list[str]) -> list[str]:
    said = [f"the views are in schema {found.views}"]
    if found.role is None:
        said[0] += "; nobody was granted anything, --role names who is"
    if elsewhere := adoption.other_storage(found):
        said.append(f"refs of projects on other storages than default, as on {elsewhere}, are left to GitLab")
    for why, views in found.left_out.items():
        blocks = ", ".join(_find_blocked(views))
        which = f"without them these batches are blocked: {blocks}" if blocks else "no batch needs them"
        said.append(f"not adopted, as {why}: {', '.join(views)}; {which}")
    return said + ([indexes.HINT, *advice] if advice else [])
