"""The children of a message: one in its arguments, or several in an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from dramatiq import Message, MessageProxy

from forgekeeper.api.answers import KeyedArguments
from forgekeeper.api.batches import ChildSpec

RUN_OPTION = "forgekeeper_run"
"""The option with the number of the run that sent the child's message."""
CALLS_OPTION = "forgekeeper_children"
"""The option with the key and the arguments of each child of a message with several children."""


def build_child_message(child: ChildSpec, calls: Sequence[KeyedArguments], run: int | None) -> Message[None]:
    """Return a message with the children *calls*, named by its first child.

    An older worker executes the first child, and the next run sends the others again.
    """
    (key, arguments), *others = calls
    options: dict[str, Any] = {"redis_message_id": str(uuid4()), RUN_OPTION: run}
    options |= {CALLS_OPTION: list(calls)} if others else {}
    return Message(child.queue, child.name, arguments, {}, options, key)


def list_calls(message: Message[Any] | MessageProxy) -> list[KeyedArguments]:
    """Return the key and the arguments of each child; the message's own without the option, or with a malformed one."""
    match message.options.get(CALLS_OPTION):
        case [_, *_] as calls if all(_is_call(one) for one in calls):
            return [(key, tuple(arguments)) for key, arguments in calls]
    return [(message.message_id, tuple(message.args))]


def _is_call(one: object) -> bool:
    match one:
        case [str(), [*_arguments]]:
            return True
    return False
