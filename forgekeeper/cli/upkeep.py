"""Settings, schema, flags: what an operator looks after (`settings`, `migrate`, `flags`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import peewee as pw
import redis
import typer

from forgekeeper import migrations
from forgekeeper.audit import acts, upkeep
from forgekeeper.boot import load
from forgekeeper.cli import previews
from forgekeeper.cli.completion import names_of
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import FAILED, Json, Problem, answer, emit, err, out, table, wrong_use
from forgekeeper.cli.releasing import FIRST, hold_new
from forgekeeper.database import database, sqlstate
from forgekeeper.flags import FLAGS, FeatureFlag
from forgekeeper.installation import place
from forgekeeper.installation.agreement import Disagreement, agree
from forgekeeper.settings.reading import Described, describe
from metrics.redaction import clean, text_of

INTRODUCTION = """# Settings

Settings are environment variables, or lines of a file `.env` where the command runs; the
environment wins. An unknown name that begins with `FORGEKEEPER_`, or a value that does not
fit, stops the start and is named. `forgekeeper settings` shows the present values.

This page is printed by `forgekeeper settings --markdown`.
"""

FORBIDDEN = "42501"
FROM = {"environment": "the environment", ".env": "the file .env"}

flags = typer.Typer(help="Feature flags: list them, or turn one on or off for all processes.")
Flag = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The flag's name; `forgekeeper flags` lists them.", autocompletion=names_of(FLAGS)
    ),
]


def settings(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md.")] = False,
) -> None:
    """List every setting with its type, default, present value, where that comes from, and sentence.

    Settings are environment variables, or lines of a file `.env` where the command runs.
    """
    described = describe(load())
    if json:
        emit([asdict(setting) for setting in described])
    elif markdown:
        out.print(page(described), end="")
    else:
        for setting in described:
            default = f", default {setting.default}" if setting.default else ""
            source = "" if setting.source == "default" else f", from {FROM[setting.source]}"
            out.print(f"{setting.name}={setting.value}  ({setting.type}{default}{source})", style="bold")
            out.print(f"    {setting.sentence}")


def page(described: list[Described]) -> str:
    """Write the documentation's page of settings."""
    rows = "".join(
        f"| `{s.name}` | {s.type.replace('|', 'or')} | {f'`{s.default}`' if s.default else ''} | {s.sentence} |\n"
        for s in described
    )
    return f"{INTRODUCTION}\n| name | type | default | what it is for |\n|---|---|---|---|\n{rows}"


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if migrations are pending.")] = False,
    json: Json = False,
) -> None:
    """Apply pending migrations of forgekeeper's own tables; the forge's are never touched.

    The first one makes the installation's id, and Redis is told it where it answers.  Of a new installation the
    batches that delete begin held: `release` lets them go.  How long the audit is kept is recorded as this command's
    FORGEKEEPER_AUDIT_KEEP says: workers drop nothing that is younger.
    """
    with connected("migrate", migrated=False, redis_needed=False) as settings:
        if check:
            pending = migrations.pending(database.obj)
            if pending and not json:
                raise Problem(f"pending: {', '.join(pending)}; run `forgekeeper migrate`")
            answer({"applied": [], "pending": pending}, "the schema is up to date", json=json)
            raise typer.Exit(FAILED if pending else 0)
        with _as_owner(), database.atomic():
            applied = apply_pending()
            held = hold_new() if FIRST in applied else []
            _keep_audit(settings.audit_keep)
        _record_place()
        if settings.redis_url is not None:
            _tell_redis()
    sentence = f"applied: {', '.join(applied)}" if applied else "the schema is up to date"
    if held:
        sentence += (
            f"\nheld, as this is a new installation: {', '.join(held)}; `forgekeeper run BATCH --dry-run` shows what"
            " each will delete, `forgekeeper release BATCH --reason REASON` lets it go"
        )
    answer({"applied": applied, "pending": [], "held": held}, sentence, json=json)


def apply_pending() -> list[str]:
    """Apply pending migrations, and record which: all in one transaction; return their names."""
    with database.atomic():
        applied = migrations.migrate(database.obj)
        if applied:
            # The first of them have made the table of acts.
            acts.record("migrate", "the schema", after={"applied": applied})
    return applied


@contextmanager
def _as_owner() -> Iterator[None]:
    """Say who migrates where this role may not."""
    try:
        yield
    except pw.ProgrammingError as error:
        if sqlstate(error) != FORBIDDEN:
            raise
        said = clean(text_of(error).strip().splitlines()[0])
        raise Problem(
            f"{said}: nothing was changed; run `forgekeeper migrate` as the role that owns forgekeeper's tables, or, "
            "before there are any, `grant usage, create on schema public to ROLE` (docs/security.md)"
        ) from error


def _keep_audit(days: int) -> None:
    before = upkeep.keep(days)
    if before != days:
        acts.record("migrate", "how long the audit is kept", before={"days": before}, after={"days": days})


def _record_place() -> None:
    try:
        place.record_first()
    except place.Unknown as unknown:
        err.print(f"batches are blocked: {unknown}; then run `forgekeeper migrate` again")


def _tell_redis() -> None:
    """Claim Redis for this installation; one that is away is told by whoever starts later, and by `check --init`."""
    try:
        agree()
    except redis.RedisError as error:
        err.print(f"Redis does not know the installation yet: {clean(str(error))}; workers and schedulers tell it")
    except Disagreement as disagreement:
        err.print(f"nothing will start: {clean(str(disagreement))}")


@flags.callback(invoke_without_command=True)
def flags_default(context: typer.Context, json: Json = False) -> None:
    """List the flags when no command is given."""
    if context.invoked_subcommand is None:
        flags_list(json=json)


@flags.command("list")
def flags_list(json: Json = False) -> None:
    """List the flags."""
    with connected("flags"):
        states = {name: FeatureFlag.is_on(name) for name in FLAGS}
    if json:
        emit({"flags": states})
    else:
        table(
            "", ("flag", "state", "what it switches"), ((n, "on" if s else "off", FLAGS[n]) for n, s in states.items())
        )


@flags.command("on")
def flags_on(
    name: Flag, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, json: Json = False
) -> None:
    """Turn a flag on.

    First shows on standard error what the batch would do that it switches on, as `run --dry-run` does, and asks
    where there is a terminal.
    """
    _known(name)
    with connected("flags") as settings:
        shown = previews.before_switching_on(name, settings, ask=not yes)
        _turn(name, on=True)
    of_batches = {"preview": shown} if shown else {}
    answer({"flags": {name: True}} | of_batches, f"{name} is on", json=json)


@flags.command("off")
def flags_off(name: Flag, json: Json = False) -> None:
    """Turn a flag off."""
    _known(name)
    with connected("flags"):
        _turn(name, on=False)
    answer({"flags": {name: False}}, f"{name} is off", json=json)


def _known(name: str) -> None:
    if name not in FLAGS:
        wrong_use(f"there is no flag {name!r}; there are: {', '.join(FLAGS)}")


def _turn(name: str, *, on: bool) -> None:
    with database.atomic():
        was_on = FeatureFlag.turn(name, on=on)
        acts.record(f"flags {'on' if on else 'off'}", name, before={"on": was_on}, after={"on": on})
