"""Errors of runs, children and processes, reported to Sentry or a server that understands its protocol.

Our own log lines with an exception at level error, and critical lines, are reported.  A report has the constant
sentence of the line, the type of each exception, its stack without variables and source, and a few tags.  Messages of
exceptions stay in the log: they may contain names and values of the forge, which no pattern recognizes.

A report costs its thread the time to copy these facts.  A thread of the SDK sends it; a full queue drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import peewee as pw

from forgekeeper.api.batches import ChildSpec, find_declaration
from forgekeeper.ledger.heartbeats import read_version
from forgekeeper.platform.database import sqlstate
from forgekeeper.platform.extras import install_command
from forgekeeper.platform.settings import PREFIX, Settings, SettingsError

if TYPE_CHECKING:
    from sentry_sdk.types import Event

MAX_QUEUED_REPORTS = 100
"""Reports that wait for the server; further reports are dropped."""
CRITICAL_FLUSH_SECONDS = 0.5
"""Seconds that a critical line waits for its report, because the process may end right after it."""
CLOSE_SECONDS = 0.5
"""Seconds that the end of a process waits for its reports."""
OUR_PACKAGES = ["forgekeeper", "forges", "metrics", "models", "scheduler", "workers"]


class ErrorReporter:
    """Reports errors to *dsn*; any thread may use it."""

    def __init__(self, dsn: str) -> None:
        # Imported here: a process without the setting does not pay for it.
        from sentry_sdk.client import Client

        self._sentry = Client(
            dsn,
            release=f"forgekeeper@{read_version()}",
            # Integrations would add modules, arguments and log lines, and report errors twice.  Personal data
            # (`send_default_pii`) is off by default; to set it is deprecated.
            default_integrations=False,
            auto_enabling_integrations=False,
            include_local_variables=False,
            include_source_context=False,
            attach_stacktrace=False,
            max_request_body_size="never",
            auto_session_tracking=False,
            send_client_reports=False,
            spotlight=False,
            transport_queue_size=MAX_QUEUED_REPORTS,
            in_app_include=OUR_PACKAGES,
        )

    @classmethod
    def from_settings(cls, settings: Settings) -> ErrorReporter | None:
        """Return the reporter of the settings, None without one; raise `SettingsError` if the extra is missing."""
        if settings.sentry_dsn is None:
            return None
        try:
            return cls(settings.sentry_dsn.get_secret_value())
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"{PREFIX}SENTRY_DSN needs the extra `sentry`, for {error.name}: {install_command('sentry')}"
            ) from None

    def report_line(self, facts: Mapping[str, Any]) -> None:
        """Report a log line, if it has an exception or is critical; it never raises."""
        is_critical, error = facts["level"] == "critical", facts.get("exc_info")
        if not isinstance(error, BaseException) and not is_critical:
            return
        with suppress(Exception):
            self._sentry.capture_event(self._build_event(facts, error, level="fatal" if is_critical else "error"))
            if is_critical:
                self._sentry.flush(timeout=CRITICAL_FLUSH_SECONDS)

    def close(self) -> None:
        """Wait for the reports for `CLOSE_SECONDS` at most, and drop the others."""
        with suppress(Exception):
            self._sentry.close(timeout=CLOSE_SECONDS)

    def _build_event(self, facts: Mapping[str, Any], error: object, *, level: Any) -> Event:
        event: Event = {}
        if isinstance(error, BaseException):
            from sentry_sdk.utils import event_from_exception

            event, _hint = event_from_exception(error, self._sentry.options)
            for value in event["exception"]["values"]:
                value["value"] = ""
                for frame in (value.get("stacktrace") or {}).get("frames", ()):
                    # It names folders of this machine.
                    frame.pop("abs_path", None)
            event["exception"]["values"][-1]["value"] = describe_code(error)
        event.update({"level": level, "message": str(facts["event"]), "tags": build_tags(facts)})
        return event


def build_tags(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a log line: batch, child, queue, run and attempt as far as known, and the reason."""
    name = facts.get("actor") or facts.get("batch")
    tags: dict[str, Any] = {"run": facts.get("run"), "attempt": facts.get("attempt")}
    if isinstance(name, str) and (declared := find_declaration(name)) is not None:
        tags |= {"batch": declared.batch.name, "queue": declared.queue}
        tags |= {"child": declared.name} if isinstance(declared, ChildSpec) else {}
    if facts["level"] == "critical" and isinstance(reason := facts.get("reason"), str):
        tags["reason"] = reason
    return {key: str(value) for key, value in tags.items() if value is not None}


def describe_code(error: BaseException) -> str:
    """Return the number of an error of PostgreSQL or of the operating system, "" of another error."""
    if isinstance(error, pw.PeeweeException) and (state := sqlstate(error)):
        return f"SQLSTATE {state}"
    return f"errno {error.errno}" if isinstance(error, OSError) and error.errno else ""
