"""The thread of an exporter that finds events and sends them to the operators' webhook."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import peewee as pw
import redis
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.batches import BATCHES, BatchSpec, FeatureFlag
from forgekeeper.ledger import operator_events
from forgekeeper.ledger.holds import Batch, find_idle_batches
from forgekeeper.ledger.operator_events import BacklogForecast, ClaimedEvent
from forgekeeper.ledger.rates import Rate, find_rates
from forgekeeper.platform.database import database, is_connected, now, release_connection
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.webhook import Webhook, WebhookError
from metrics.logs import describe_error
from metrics.threads import CriticalThread

WATCH_INTERVAL_SECONDS = 15.0
"""Pause in seconds between two turns."""
DELIVERY_SECONDS = 20.0
"""Seconds of a turn after which no further event is sent: with the last request, a turn takes half a minute."""

log = structlog.get_logger(__name__)


class EventWatch(CriticalThread):
    """Finds events and sends them, every few seconds.

    Errors of servers cost a turn, and an error of the webhook costs an attempt at one event.  Nothing waits for this
    thread, and the end of its process interrupts it.
    """

    def __init__(self, settings: Settings, webhook: Webhook) -> None:
        super().__init__("events")
        self._settings = settings
        self._webhook = webhook

    def run_until_stopped(self) -> None:
        """Watch until stopped."""
        while True:
            self.take_turn(self.watch_once)
            if self.stopped.wait(WATCH_INTERVAL_SECONDS):
                return

    def watch_once(self) -> None:
        """Record the present events, and send those whose next attempt is due."""
        try:
            database.connect(reuse_if_open=True)
            operator_events.record_holds()
            for batch, forecast in self._forecast_backlogs():
                operator_events.record_forecast(batch, forecast)
            self._send_due_events()
            operator_events.delete_old_events()
        except (pw.PeeweeException, MaxConnectionsExceeded, redis.RedisError, OSError) as error:
            log.warning("events not watched", error=describe_error(error))
        finally:
            release_connection()

    def _forecast_backlogs(self) -> Iterator[tuple[str, BacklogForecast]]:
        """Yield the forecast of each batch that may delete at present and has an objective."""
        excused = find_idle_batches(self._settings) | {row.name for row in Batch.list_blocked()}
        rates = find_rates()
        for name, batch in BATCHES.items():
            if name in excused or (batch.flag is not None and not FeatureFlag.is_on(batch.flag)):
                continue
            if (forecast := self._forecast_backlog(batch, rates.get(name, Rate()))) is not None:
                yield name, forecast

    def _forecast_backlog(self, batch: BatchSpec, rate: Rate) -> BacklogForecast | None:
        """Return the forecast; None without an objective, or if the backlog cannot be read."""
        objective, schedule = batch.shortest_objective, self._settings.schedule_of(batch.name)
        if objective is None or schedule is None:
            return None
        try:
            with read_only_snapshot():
                instant = now()
                backlog = batch.sum_backlogs(instant)
        except (pw.PeeweeException, redis.RedisError) as error:
            if not is_connected():
                raise
            log.warning("backlog unknown", batch=batch.name, error=describe_error(error))
            return None
        if backlog is None:
            return None
        waited = instant - (backlog.oldest or instant)
        return BacklogForecast(
            backlog.records, waited, rate.seconds_for(backlog.records), objective, schedule.longest_interval
        )

    def _send_due_events(self) -> None:
        for kind, batch, attempts in operator_events.give_up_old_events():
            log.error("event given up", kind=kind, batch=batch, attempts=attempts)
        ends = monotonic() + DELIVERY_SECONDS
        while monotonic() < ends and (claimed := operator_events.claim_event()) is not None:
            # The receiver may take seconds, for which no connection is kept.
            release_connection()
            is_accepted = self._send(claimed)
            database.connect(reuse_if_open=True)
            if is_accepted:
                operator_events.close_event(claimed)

    def _send(self, claimed: ClaimedEvent) -> bool:
        facts = {"kind": claimed.event.kind, "batch": claimed.event.data["batch"], "attempt": claimed.attempts}
        try:
            self._webhook.send_event(claimed.event)
        except WebhookError as error:
            log.warning("event not delivered", **facts, error=describe_error(error))
            return False
        log.info("event delivered", **facts)
        return True
