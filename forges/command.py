"""`adopt`: fit forgekeeper to the tables of a forge."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import Json, Problem, answer, emit, write, wrong_use
from forgekeeper.database import database
from forges.gitlab import adoption, indexes

FORGES = ("gitlab",)
RECORDED = "select coalesce(has_table_privilege(to_regclass('audit_acts'), 'insert'), false)"


def adopt(
    forge: Annotated[str, typer.Argument(metavar="FORGE", help="Whose tables they are: gitlab.")],
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", help="The role that forgekeeper connects as; it is granted the views.")
    ] = None,
    tables: Annotated[str, typer.Option("--tables", help="The schema of the forge's own tables.")] = "public",
    json: Json = False,
) -> None:
    """Make views of a forge's own tables, in which the batches find what they expect.

    The views go into the schema that FORGEKEEPER_FORGE_SCHEMA names; run this as the role that owns the forge's tables.
    Running it again, as after an upgrade of the forge, makes them as they should be; no row is touched.
    """
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
    facts = {"forge": forge, "tables": tables, "views": found.views, "role": role, "indexes": advice}
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


def _said(found: adoption.Adoption, advice: list[str]) -> list[str]:
    said = [f"the views are in schema {found.views}"]
    if found.role is None:
        said[0] += "; nobody was granted anything, --role names who is"
    if elsewhere := adoption.other_storage(found):
        said.append(f"refs of projects on other storages than default, as on {elsewhere}, are left to GitLab")
    return said + ([indexes.HINT, *advice] if advice else [])
