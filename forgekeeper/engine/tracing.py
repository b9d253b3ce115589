"""Spans of runs, children and chunks, sent to a collector of OpenTelemetry over HTTP.

The trace of a run follows from the installation and the number of the run, so a child that knows the run's number is in
the run's trace, and its message needs no further field.  The span of a run's first attempt has an id that follows from
them, too; children and later attempts are its children.  The variables ``OTEL_*`` configure the SDK.

A span costs its thread the time to create it.  A thread of the SDK sends it; a full queue drops it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from forgekeeper.api.batches import ChildSpec, Declaration
from forgekeeper.ledger.heartbeats import read_version
from forgekeeper.platform.extras import install_command
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import PREFIX, Settings, SettingsError
from metrics.threads import DaemonThread

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

CLOSE_SECONDS = 1.0
"""Seconds that the end of a process waits for its spans."""


class RunIds(NamedTuple):
    """The ids of a run's trace and of the span of its first attempt."""

    trace: int
    span: int


def derive_run_ids(installation: str, run: int) -> RunIds:
    """Return the ids of a run, which are equal in each process of the installation."""
    digest = hashlib.sha256(f"{installation}/{run}".encode()).digest()
    return RunIds(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))


class Tracing:
    """The spans of a process; any thread may start one."""

    def __init__(self, provider: TracerProvider, preset: threading.local) -> None:
        self._provider = provider
        self._preset = preset
        self._tracer: Tracer = provider.get_tracer("forgekeeper")
        self._installation: str | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Tracing | None:
        """Return the tracing of the settings, None if it is off; raise `SettingsError` if the extra is missing."""
        if settings.tracing == "off":
            return None
        try:
            return cls(*_create_provider())
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"{PREFIX}TRACING needs the extra `otel`, for {error.name}: {install_command('otel')}"
            ) from None

    def start_attempt(self, declared: Declaration, *, run: int | None, attempt: int | None, key: str) -> AttemptSpan:
        """Start the span of an attempt at a run, or at the child *key*; needs a connection for the first span."""
        is_child = isinstance(declared, ChildSpec)
        facts: dict[str, Any] = {"run": run, "attempt": attempt, "batch": declared.batch.name}
        facts |= {"child": declared.name, "child.key": key} if is_child else {}
        attributes = {f"forgekeeper.{name}": value for name, value in facts.items() if value is not None}
        name = f"{'child' if is_child else 'run'} {declared.name}"
        if run is None:
            return AttemptSpan(self._tracer, self._tracer.start_span(name, attributes=attributes))
        ids = derive_run_ids(self._find_installation(), run)
        if is_child or attempt != 1:
            context = self._build_context(ids)
            return AttemptSpan(self._tracer, self._tracer.start_span(name, context, attributes=attributes))
        self._preset.ids = ids
        try:
            return AttemptSpan(self._tracer, self._tracer.start_span(name, attributes=attributes))
        finally:
            self._preset.ids = None

    def close(self) -> None:
        """Wait for the spans for `CLOSE_SECONDS` at most; the SDK itself would wait longer."""
        with suppress(RuntimeError):  # a thread that cannot start must not delay the end
            thread = DaemonThread(self._provider.force_flush, "last spans", timeout=CLOSE_SECONDS)
            thread.start()
            thread.join(CLOSE_SECONDS)

    def _find_installation(self) -> str:
        if self._installation is None:
            self._installation = Installation.find_id() or ""
        return self._installation

    def _build_context(self, ids: RunIds) -> Context:
        """Return the context of the run's span, sampled if that span is: the sampler decides by the trace alone."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        decision = self._provider.sampler.should_sample(None, ids.trace, "run").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        parent = SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent))


class AttemptSpan:
    """The span of an attempt, and of its present chunk; used by the attempt's thread."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._chunk: Span | None = None
        self._deleted = 0

    def start_chunk(self) -> None:
        """Start the span of a chunk; a chunk that is not ended is not sent."""
        from opentelemetry.trace import set_span_in_context

        self._chunk = self._tracer.start_span("chunk", set_span_in_context(self._span))

    def note_progress(self, deleted: int) -> None:
        """End the present chunk if the attempt has deleted more, *deleted* in all; start the next chunk."""
        if self._chunk is None or deleted <= self._deleted:
            return
        self._chunk.set_attribute("forgekeeper.deleted", deleted - self._deleted)
        self._chunk.end()
        self._deleted = deleted
        self.start_chunk()

    def end(self, deleted: int, stopped: str | None, error: BaseException | None) -> None:
        """End the span with its facts.  Of an *error* only the type is sent: its message may name data of the forge."""
        from opentelemetry.trace import StatusCode

        self.note_progress(deleted)
        self._span.set_attribute("forgekeeper.deleted", deleted)
        if stopped is not None:
            self._span.set_attribute("forgekeeper.stopped", stopped)
        if error is not None:
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _create_provider() -> tuple[TracerProvider, threading.local]:
    """Create the SDK's provider, and the place for the ids of a run's first attempt."""
    # Imported here: a process without the setting does not pay for it.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    preset = threading.local()

    class DerivedIds(RandomIdGenerator):
        """Random ids, except for a span whose ids are preset in this thread."""

        def generate_span_id(self) -> int:
            ids: RunIds | None = getattr(preset, "ids", None)
            return super().generate_span_id() if ids is None else ids.span

        def generate_trace_id(self) -> int:
            ids: RunIds | None = getattr(preset, "ids", None)
            return super().generate_trace_id() if ids is None else ids.trace

    ours = Resource({"service.name": "forgekeeper", "service.version": read_version()})
    provider = TracerProvider(
        # The environment wins.
        resource=ours.merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
        id_generator=DerivedIds(),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    # It warns of each span that a full queue drops.
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)
    return provider, preset
