"""Sends traces: OpenTelemetry's SDK behind our spans. Only `tracing.start()` imports this.

Ended spans wait in the SDK's bounded queue for its own thread, so only `stop()` ever waits for the collector, and not
for long. The provider is ours alone: OpenTelemetry's global one belongs to the surrounding program. The current span
is shared, though, so spans of instrumented libraries nest correctly among ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from batchwright.telemetry.tracing import Attributes, parsed

log = logging.getLogger(__name__)

EXPORT_SECONDS = 5.0
"""Time limit for sending one batch of spans, unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""
STOP_SECONDS = 1.5
TEXT_CHARACTERS_MAX = 1_000
WARN_SECONDS = 3_600.0
_LONGEST_INTEGER = 2**63 - 1
_STATUS = re.compile(r"\bcode: (\d{3})\b")


class Otlp:
    """Spans by OTLP over HTTP; the SDK's environment variables control how they are sampled, queued and sent."""

    def __init__(self, service_name: str, version: str | None) -> None:
        self._logs = _LogFilter()
        self._exporter = _Exporter(self._logs)
        processor = BatchSpanProcessor(self._exporter)
        self._provider = TracerProvider(resource=_resource(service_name, version), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("batchwright", version)
        self._asked = threading.Event()
        self._stopped = threading.Event()
        self._logs.listen()
        # Created now, because no thread can be started while the interpreter exits.
        threading.Thread(target=self._wait_and_end, name="batchwright-tracing", daemon=True).start()

    def span(self, name: str, parent: str | None, attributes: Attributes | None, current: bool) -> _Recorded:
        origin = _remote(parent)
        above = None if origin is None else trace.set_span_in_context(NonRecordingSpan(origin))
        made = self._tracer.start_span(name, above, attributes=_sendable(attributes))
        return _Recorded(made, self._logs, current)

    def detached(self, name: str, link: str | None, attributes: Attributes | None) -> _Recorded:
        origin = _remote(link)
        links = [] if origin is None else [trace.Link(origin)]
        made = self._tracer.start_span(name, context.Context(), attributes=_sendable(attributes), links=links)
        return _Recorded(made, self._logs, True)

    @contextlib.contextmanager
    def handed(self, traceparent: str | None) -> Iterator[None]:
        origin = _remote(traceparent)
        span = trace.INVALID_SPAN if origin is None else trace.NonRecordingSpan(origin)
        token = context.attach(trace.set_span_in_context(span, context.Context()))
        try:
            yield
        finally:
            context.detach(token)

    def current_traceparent(self) -> str | None:
        found = trace.get_current_span().get_span_context()
        return _traceparent(found) if found.is_valid else None

    def stop(self) -> None:
        self._asked.set()
        if not self._stopped.wait(STOP_SECONDS):
            self._logs.warn(f"the collector did not take the last of them within {STOP_SECONDS} s")
            self._exporter.shutdown()

    def _wait_and_end(self) -> None:
        """The SDK's shutdown may take half a minute; it runs in this thread, for which nothing waits."""
        self._asked.wait()
        try:
            with self._logs.muted():
                self._provider.shutdown()
        finally:
            self._stopped.set()
            self._logs.leave()


class _Recorded:
    """A span of the SDK's."""

    __slots__ = ("_current", "_error", "_logs", "_span", "_token")

    def __init__(self, span: trace.Span, logs: _LogFilter, current: bool) -> None:
        self._span = span
        self._logs = logs
        self._current = current
        self._error: BaseException | None = None

    @property
    def traceparent(self) -> str:
        return _traceparent(self._span.get_span_context())

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_sendable(attributes))

    def error(self, error: BaseException) -> None:
        """Record the type and message of an error, once; its traceback is in the log, if anywhere."""
        if error is not self._error and self._span.is_recording():
            self._error = error
            kind, text = type(error).__qualname__, _message_of(error)
            self._span.add_event("exception", {"exception.type": kind, "exception.message": text})
            self._span.set_status(Status(StatusCode.ERROR, text or kind))

    def __enter__(self) -> Self:
        if self._current:
            self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._current:
            context.detach(self._token)
        if error is not None and not isinstance(error, GeneratorExit):  # a reader may stop at any time
            self.error(error)
        self._error = None  # its traceback refers to this span: a reference cycle
        with self._logs.muted():
            self._span.end()


class _Exporter(SpanExporter):
    """Drops spans without raising, and with one warning."""

    def __init__(self, logs: _LogFilter) -> None:
        is_set = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{of}TIMEOUT") for of in ("", "TRACES_"))
        self._http: SpanExporter = OTLPSpanExporter(timeout=None if is_set else EXPORT_SECONDS)
        self._logs = logs

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._logs.muted():
            try:
                result = self._http.export(spans)
            except Exception as error:  # one invalid span must not end the thread that sends all others
                result = SpanExportResult.FAILURE
                self._logs.warn(f"sending failed with {type(error).__name__}")
        if result is not SpanExportResult.SUCCESS:
            self._logs.warn_of_collector()
        return result

    def shutdown(self) -> None:
        with self._logs.muted():
            self._http.shutdown()


class _LogFilter(logging.Filter):
    """Filters what the SDK logs while it works for us: suppressed, and summed up in one warning an hour.

    Its other log lines in this process pass. Addresses are never repeated: they may contain keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()
        self._status: str | None = None
        self._warned_at: float | None = None
        self._loggers: list[logging.Logger] = []

    def listen(self) -> None:
        names = [name for name in logging.root.manager.loggerDict if name.startswith("opentelemetry.")]
        self._loggers = [logging.getLogger(name) for name in (*names, "urllib3.connectionpool")]
        for logger in self._loggers:
            logger.addFilter(self)

    def leave(self) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        before, self._here.muted = getattr(self._here, "muted", False), True
        try:
            yield
        finally:
            self._here.muted = before

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(self._here, "muted", False):
            return True
        text = record.getMessage()
        if found := _STATUS.search(text):
            self._status = found[1]
        if text.startswith("Queue full"):
            self.warn("they come faster than the collector accepts them")
        return False

    def warn_of_collector(self) -> None:
        answer = "cannot be reached or does not answer" if self._status is None else f"answers with {self._status}"
        self._status = None
        self.warn(f"the collector {answer}")

    def warn(self, reason: str) -> None:
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            log.warning("spans are lost: %s; the work continues, and this is logged at most once an hour", reason)


def _resource(service_name: str, version: str | None) -> Resource:
    """Our resource attributes; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have priority."""
    ours = {"service.name": service_name} | ({} if version is None else {"service.version": version})
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


def _remote(traceparent: str | None) -> SpanContext | None:
    fields = None if traceparent is None else parsed(traceparent)
    if fields is None:
        return None
    trace_id, span_id, flags = (int(field, 16) for field in fields)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _traceparent(of: SpanContext) -> str:
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"


def _sendable(attributes: Attributes | None) -> dict[str, str | int | float | bool]:
    """Convert to what protobuf accepts: one refused value would lose the whole batch of spans."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in (attributes or {}).items():
        match value:
            case None:
                continue
            case str():
                found[name] = _text(value)
            case int() if not -_LONGEST_INTEGER <= value <= _LONGEST_INTEGER:
                found[name] = str(value)
            case _:
                found[name] = value
    return found


def _message_of(error: BaseException) -> str:
    try:
        return _text(str(error))
    except Exception:  # a broken __str__; the user's error must be raised unchanged
        return ""


def _text(value: str) -> str:
    return value[:TEXT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
