"""Events for the operators' webhook: an outbox in PostgreSQL, from which any number of exporters send.

An event is a fact of the database that an exporter finds: no run and no child writes one, so none waits for a webhook.
Exporters that find a fact at the same time insert one row, because its *subject* is unique.  A row is claimed by the
time of its next attempt.  An exporter that dies after a request and before the row is closed leaves an event that is
sent again with the same id.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField
from psycopg2.extras import Json

from forgekeeper.platform.database import Base, BigIdentityField, Document, database, default_sql
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.webhook import WebhookEvent

HELD, AT_RISK, DRAINED = "batch.held", "objective.at_risk", "backlog.drained"
"""Kinds of events; receivers know them."""
MAX_HOLD_AGE = timedelta(days=1)
"""Maximum age of a hold that is reported; a webhook that is configured later reports no older hold."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 15, 3600
"""Pause in seconds after the first failed attempt, which doubles each time, and its upper limit."""
MAX_DELIVERY_AGE = timedelta(days=1)
"""Age at which an event is given up."""
KEPT_AFTER = timedelta(days=30)
"""How long a closed event is kept; longer than `MAX_HOLD_AGE`, so that no hold is reported twice."""

INSERT_HELD = f"""
    insert into operator_events (kind, batch, subject, detail)
    select '{HELD}', batch, id::text, jsonb_build_object('reason', reason, 'since', since) from holds
    where kind = 'breaker' and since > clock_timestamp() - %s and (until is null or until > clock_timestamp())
    on conflict do nothing
"""
INSERT_EVENT = """
    insert into operator_events (kind, batch, subject, detail) values (%s, %s, %s, %s) on conflict do nothing
"""
SELECT_LAST = f"""
    select id, kind from operator_events where batch = %s and kind in ('{AT_RISK}', '{DRAINED}')
    order by id desc limit 1
"""
# The pause after an attempt is longer than the attempt: nobody else claims the event meanwhile.
CLAIM_EVENT = f"""
    update operator_events set attempts = attempts + 1, next_try_at = clock_timestamp()
        + least(interval '{FIRST_RETRY_SECONDS} s' * power(2, least(attempts, 20)), interval '{MAX_RETRY_SECONDS} s')
    where id = (
        select id from operator_events where next_try_at <= clock_timestamp() order by id limit 1
        for update skip locked
    )
    returning id, event::text, kind, batch, detail, at, attempts
"""
CLOSE_DELIVERED = "update operator_events set delivered_at = clock_timestamp(), next_try_at = null where id = %s"
GIVE_UP = """
    update operator_events set next_try_at = null where next_try_at is not null and at < clock_timestamp() - %s
    returning kind, batch, attempts
"""
SELECT_UNDELIVERED = """
    select min(at) filter (where next_try_at is not null),
        count(*) filter (where next_try_at is null and delivered_at is null)
    from operator_events
"""
# The newest event about a backlog says whether it is at risk.
DELETE_OLD = f"""
    delete from operator_events as event where next_try_at is null and at < clock_timestamp() - %s
    and (kind = '{HELD}' or exists (
        select from operator_events as newer
        where newer.batch = event.batch and newer.kind <> '{HELD}' and newer.id > event.id
    ))
"""


class OperatorEvent(Base):
    """An event of a *kind* about a batch: what it is about (*subject*), and its facts (*detail*).

    *event* is the id that receivers see.  *next_try_at* is None once the event is delivered or given up.
    """

    grants = "exporter: select, insert, update, delete"

    id = BigIdentityField()
    event = pw.UUIDField(constraints=default_sql("gen_random_uuid()"))
    kind = pw.TextField()
    batch = pw.TextField()
    subject = pw.TextField()
    detail = Document(dict)
    at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    attempts = pw.IntegerField(constraints=default_sql("0"))
    next_try_at = DateTimeTZField(null=True, constraints=default_sql("clock_timestamp()"))
    delivered_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "operator_events"


OperatorEvent.add_index(pw.SQL("create unique index operator_events_subject on operator_events (batch, kind, subject)"))
OperatorEvent.indexed("operator_events_next on operator_events (next_try_at) where next_try_at is not null")


class BacklogForecast(NamedTuple):
    """The backlog of a batch: how long its oldest record has waited, and the seconds until it is deleted.

    *objective* is the longest time that a record may wait, *interval* the longest time between two ticks.
    *seconds_left* is None if the batch has deleted nothing in the last hour.
    """

    records: int
    waited: timedelta
    seconds_left: float | None
    objective: timedelta
    interval: timedelta

    @property
    def is_at_risk(self) -> bool:
        """Whether a record has missed the objective, or will miss it at the rate of the last hour.

        A batch that deletes all due records with each tick is not limited by its rate.  So the oldest record must have
        waited for two intervals: a tick has left it.
        """
        misses = self.seconds_left is not None and self.seconds_left > self.objective.total_seconds()
        return self.waited > 2 * self.interval and (misses or self.waited > self.objective)

    @property
    def is_drained(self) -> bool:
        """Whether no record has waited longer than from one tick to the next."""
        return not self.records or self.waited <= self.interval

    def build_detail(self) -> dict[str, Any]:
        """Return the facts that receivers get."""
        return {
            "backlog": self.records,
            "oldest_waited_seconds": round(self.waited.total_seconds()),
            "objective_seconds": round(self.objective.total_seconds()),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left),
            "missed": self.waited > self.objective,
        }


class UndeliveredEvents(NamedTuple):
    """The time of the oldest event that waits for its delivery, and the number of kept events that were given up."""

    oldest: datetime | None
    given_up: int


class ClaimedEvent(NamedTuple):
    """An event that this process sends now."""

    id: int
    event: WebhookEvent
    attempts: int


def record_holds() -> None:
    """Record an event for each new hold of the circuit breaker."""
    database.execute_sql(INSERT_HELD, (MAX_HOLD_AGE,))


def record_forecast(batch: str, forecast: BacklogForecast) -> None:
    """Record an event if the batch's backlog has become at risk, or is drained after that."""
    last, kind = database.execute_sql(SELECT_LAST, (batch,)).fetchone() or (0, DRAINED)
    if kind == DRAINED and forecast.is_at_risk:
        _insert_event(AT_RISK, batch, last, forecast)
    elif kind == AT_RISK and forecast.is_drained:
        _insert_event(DRAINED, batch, last, forecast)


def _insert_event(kind: str, batch: str, last: int, forecast: BacklogForecast) -> None:
    # The event before is the subject: of two exporters that have read it, one inserts.
    database.execute_sql(INSERT_EVENT, (kind, batch, str(last), Json(forecast.build_detail())))


def claim_event() -> ClaimedEvent | None:
    """Claim the oldest event whose next attempt is due; None if all wait."""
    row = database.execute_sql(CLAIM_EVENT).fetchone()
    if row is None:
        return None
    number, event, kind, batch, detail, at, attempts = row
    data = {"installation": Installation.find_id(), "batch": batch, **detail}
    return ClaimedEvent(number, WebhookEvent(event, kind, _format_instant(at), data), attempts)


def close_event(claimed: ClaimedEvent) -> None:
    """Record that the receiver has accepted the event."""
    database.execute_sql(CLOSE_DELIVERED, (claimed.id,))


def give_up_old_events() -> list[tuple[str, str, int]]:
    """Give up events that nobody has accepted for a day; return kind, batch and attempts of each."""
    given_up: list[tuple[str, str, int]] = database.execute_sql(GIVE_UP, (MAX_DELIVERY_AGE,)).fetchall()
    return given_up


def find_undelivered_events() -> UndeliveredEvents:
    """Return the events that no receiver has accepted."""
    return UndeliveredEvents(*database.execute_sql(SELECT_UNDELIVERED).fetchone())


def delete_old_events() -> None:
    """Delete old closed events, except the newest about each backlog."""
    database.execute_sql(DELETE_OLD, (KEPT_AFTER,))


def _format_instant(at: datetime) -> str:
    return at.isoformat()
