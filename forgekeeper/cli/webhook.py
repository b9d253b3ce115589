"""`webhook`: list the events for the operators' webhook, and send a test event."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

import typer
from dramatiq.common import current_millis

from forgekeeper.cli.connection import connect_command, load_and_configure_logging
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
from forgekeeper.ledger.operator_events import OperatorEvent
from forgekeeper.platform.settings import PREFIX
from forgekeeper.platform.webhook import Webhook, WebhookError, WebhookEvent

TEST_KIND = "webhook.test"


def webhook_list(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of events, the newest first.")] = 20,
    json: Json = False,
) -> None:
    """List the last events, each with its attempts and the time of its delivery."""
    with connect_command("webhook", redis_needed=False):
        events = list(OperatorEvent.select().order_by(OperatorEvent.id.desc()).limit(limit))
    if json:
        print_json({"events": [_event_facts(one) for one in events]})
        return
    rows = ((one.at, one.kind, one.batch, one.attempts, _describe_state(one)) for one in events)
    print_table(("at", "event", "batch", "attempts", "state"), ((format_time(at), *rest) for at, *rest in rows))


webhook = create_group("webhook", "List the events for the webhook, and send it a test event.", webhook_list)


@webhook.command("test")
def webhook_test(json: Json = False) -> None:
    """Send a signed test event to the webhook of the settings; exit 1 unless the receiver accepts it.

    It needs no server but the receiver.  Exporters send the other events.
    """
    receiver = Webhook.from_settings(load_and_configure_logging())
    if receiver is None:
        wrong_use(f"there is no webhook: set {PREFIX}WEBHOOK_URL and {PREFIX}WEBHOOK_SECRET")
    event = WebhookEvent(str(uuid4()), TEST_KIND, datetime.fromtimestamp(current_millis() / 1000, UTC).isoformat(), {})
    try:
        receiver.send_event(event)
    except WebhookError as error:
        raise Problem(f"the event was not delivered: {error}") from error
    print_answer({"id": event.id, "delivered": True}, f"the receiver has accepted event {event.id}", json=json)


def _describe_state(event: OperatorEvent) -> str:
    if event.delivered_at is not None:
        return f"delivered at {format_time(event.delivered_at)}"
    return "given up" if event.next_try_at is None else f"next attempt at {format_time(event.next_try_at)}"


def _event_facts(event: OperatorEvent) -> dict[str, Any]:
    names = ("event", "kind", "batch", "detail", "at", "attempts", "next_try_at", "delivered_at")
    return {name: getattr(event, name) for name in names}
