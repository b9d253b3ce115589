"""The commands `console token`, which manage the tokens of the console's API."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from forgekeeper.cli.connection import load_and_configure_logging
from forgekeeper.cli.console.named_lines import NAME_RULE, LineFile, is_valid_name
from forgekeeper.cli.console.tokens import TOKEN_FORMAT, ApiToken, create_token, hash_token, read_clock
from forgekeeper.cli.terminal import (
    Json,
    Problem,
    create_group,
    format_time,
    print_answer,
    print_json,
    print_table,
    wrong_use,
)
from forgekeeper.platform.settings import PREFIX

MAX_TOKEN_DAYS = 3_650


def list_tokens(*, json: Json = False) -> None:
    """List the tokens, without the tokens themselves: only their hashes are stored."""
    instant = read_clock()
    found = [_token_facts(one, instant) for one in _require_token_file().read_lines().values()]
    if json:
        print_json(found)
        return
    rows = (
        (one["name"], one["created_at"], one["expires_at"] or "never", "expired" if one["expired"] else "valid")
        for one in found
    )
    print_table(["token", "created", "expires", "state"], rows)


token = create_group("token", "List and change the read-only tokens of the console's API.", list_tokens)


@token.command("add")
def add_token(
    name: Annotated[str, typer.Argument(help="A name for the log, such as the program that sends the token.")],
    *,
    days: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKEN_DAYS, help="Days until the token expires; by default never."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a token that may read the API, and print it.  It is shown only this once."""
    tokens = _require_token_file()
    if not is_valid_name(name):
        wrong_use(NAME_RULE)
    instant = read_clock()
    expires = None if days is None else instant + timedelta(days=days)
    secret = create_token()
    added = ApiToken(name, instant, expires, hash_token(secret))
    with tokens.edit_lines() as known:
        if name in known:
            raise Problem(f"there is a token {name!r} already: remove it, or choose another name")
        known[name] = added
    facts = {"name": name, "token": secret, "created_at": instant, "expires_at": expires}
    end = f"until {format_time(expires)}" if expires else f"until `forgekeeper console token remove {name}`"
    print_answer(facts, f"{secret}\n{name} may read the API {end}; the token is not shown again", json=json)


@token.command("remove")
def remove_token(name: Annotated[str, typer.Argument(help="The token's name.")], *, json: Json = False) -> None:
    """Remove a token: from now on it reads nothing."""
    _require_token_file().remove_line(name)
    print_answer({"name": name, "done": "removed"}, f"removed {name}", json=json)


def _token_facts(one: ApiToken, instant: datetime) -> dict[str, Any]:
    return {
        "name": one.name,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        "expired": one.is_expired(instant),
    }


def _require_token_file() -> LineFile[ApiToken]:
    if (path := load_and_configure_logging().console_tokens) is None:
        wrong_use(f"{PREFIX}CONSOLE_TOKENS is not set: set it to the path of the file with the API's tokens")
    return LineFile(path, TOKEN_FORMAT)
