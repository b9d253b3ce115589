"""Traces, where OpenTelemetry is installed: a message carries the `traceparent` of whoever sent it.

Each attempt at a message is a span, a child of the one in which the message was sent; its
trace's id is on the log lines.  Where the spans go is the business of OpenTelemetry's own
configuration, as with `opentelemetry-instrument forgekeeper worker`.
"""

from __future__ import annotations

from contextvars import Token
from threading import get_ident
from typing import Any

import structlog
from dramatiq import Broker, Message, MessageProxy
from dramatiq.middleware import Middleware

try:
    from opentelemetry import context, propagate, trace
except ImportError:
    installed = False
else:
    installed = True

HEADER = "traceparent"
"""The W3C's name, among a message's options."""


def tracing() -> list[Middleware]:
    """Return what traces messages; nothing where OpenTelemetry is not installed."""
    return [Tracing()] if installed else []


class Tracing(Middleware):
    """Makes a span of each attempt, and lets messages that are sent meanwhile say so."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("forgekeeper")
        # By thread too: a message may come again while its first copy is still in hand.
        self._spans: dict[tuple[int, str], tuple[trace.Span, Token[context.Context]]] = {}

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Note the present span; a message that is sent once more belongs to where it was sent first."""
        if trace.get_current_span() is trace.INVALID_SPAN:
            return
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        if HEADER in carrier:
            message.options.setdefault(HEADER, carrier[HEADER])

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin a span, unless nobody records any and there is none of the sender's to hand on."""
        if HEADER not in message.options and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return
        sender = propagate.extract({HEADER: str(message.options.get(HEADER, ""))})
        span = self._tracer.start_span(
            message.actor_name,
            sender,
            trace.SpanKind.CONSUMER,
            {"messaging.message.id": message.message_id, "messaging.destination.name": message.queue_name},
        )
        self._spans[get_ident(), message.message_id] = span, context.attach(trace.set_span_in_context(span, sender))
        trace_id = span.get_span_context().trace_id
        if trace_id != trace.INVALID_TRACE_ID:
            structlog.contextvars.bind_contextvars(trace_id=trace.format_trace_id(trace_id))

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """End it."""
        attempt = get_ident(), message.message_id
        if attempt not in self._spans:
            return
        span, token = self._spans.pop(attempt)
        if exception is not None:
            span.record_exception(exception)
            span.set_status(trace.StatusCode.ERROR)
        context.detach(token)
        span.end()
        structlog.contextvars.unbind_contextvars("trace_id")

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """End it: it was no attempt, but somebody had the message in hand."""
        self.after_process_message(broker, message)
