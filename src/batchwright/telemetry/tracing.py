"""Optional traces: spans go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, or nowhere.

While tracing is off, nothing of OpenTelemetry is imported, a span costs less than a microsecond, and a caller's
traceparent is passed on unchanged. Tracing is on or off for the whole process, like logs; the code that sends spans is
in `batchwright.telemetry.otlp`.

>>> with span("process-batch", parent=ctx.traceparent, attributes={"batch.id": batch.id}) as batch_span:
...     await ask(body, traceparent=batch_span.traceparent)
...     batch_span.set({"batch.request.total": 50_000})
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

Attributes = Mapping[str, str | int | float | bool | None]
"""Attributes of a span, by dotted names; None values are left out."""

log = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ZERO_IDS = {"0" * 32, "0" * 16}


class Span(Protocol):
    """A unit of work; an exception raised through it is recorded as its error."""

    @property
    def traceparent(self) -> str | None:
        """The traceparent for code that works for this span; while tracing is off, the one that we received."""

    def set(self, attributes: Attributes) -> None: ...

    def error(self, error: BaseException) -> None:
        """Record a failure that is handled and so not raised through the span."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the span; an exception is raised further."""


class Recorder(Protocol):
    """Creates spans that are sent to a collector."""

    def span(self, name: str, parent: str | None, attributes: Attributes | None, current: bool) -> Span: ...

    def detached(self, name: str, link: str | None, attributes: Attributes | None) -> Span: ...

    def handed(self, traceparent: str | None) -> AbstractContextManager[object]: ...

    def current_traceparent(self) -> str | None: ...

    def stop(self) -> None: ...


_recorder: Recorder | None = None
_handed: contextvars.ContextVar[str | None] = contextvars.ContextVar("batchwright_traceparent", default=None)
"""While tracing is off: the traceparent of the innermost span."""


def start(service_name: str = "batchwright", version: str | None = None) -> bool:
    """Start tracing if the environment asks for it; returns whether tracing is on.

    It never raises: if tracing is impossible, one line says why, and work continues without. OTEL_SERVICE_NAME
    overrides the name.
    """
    global _recorder
    if _recorder is not None or not _is_wanted():
        return _recorder is not None
    try:
        _recorder = _otlp(service_name, version)
    except ImportError as error:
        log.warning("%s is set, but tracing needs more packages: pip install 'batchwright[otel]' (%s)", ENDPOINT, error)
    except Exception as error:
        log.warning("tracing stays off: %s", error)
    else:
        atexit.register(stop)
    return _recorder is not None


def stop() -> None:
    """Send the remaining spans and stop tracing; takes up to two seconds, so call it last, and not in an event loop."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        atexit.unregister(stop)
        recorder.stop()


def span(name: str, *, parent: str | None = None, attributes: Attributes | None = None, current: bool = True) -> Span:
    """A span below `parent`, a W3C traceparent; without one, or with an invalid one, below the current span.

    Inside a generator use `current=False`: it runs in the context of its consumer, which it must not change.
    """
    if _recorder is not None:
        return _recorder.span(name, parent, attributes, current)
    return _OFF if parent is None else _Handed(parent, current)


def detached(name: str, link: str | None, *, attributes: Attributes | None = None) -> Span:
    """A span that begins its own trace and only links to another one, which may end or be cancelled earlier."""
    return _Handed(link) if _recorder is None else _recorder.detached(name, link, attributes)


def handed(traceparent: str | None) -> AbstractContextManager[object]:
    """Inside it, spans are children of this one: for code that works for a span which another task began."""
    return _Handed(traceparent) if _recorder is None else _recorder.handed(traceparent)


def current_traceparent() -> str | None:
    return _handed.get() if _recorder is None else _recorder.current_traceparent()


def incoming(headers: Mapping[str, str]) -> str | None:
    """The traceparent of a request, in the form of version 00; an invalid or repeated one is ignored.

    Accepts any mapping of names to values; one of Starlette's shows a repeated header.
    """
    found = [value for name, value in headers.items() if name.lower() == "traceparent"]
    fields = parsed(found[0].strip(" \t")) if len(found) == 1 else None
    return None if fields is None else "00-{}-{}-{}".format(*fields)


def parsed(traceparent: str) -> tuple[str, str, str] | None:
    """Trace id, span id and flags in hexadecimal; None if it is not a W3C traceparent."""
    found = _FIELDS.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not _ZERO_IDS.isdisjoint((trace_id, span_id)):
        return None
    if version != "00":  # of a future version we know only the flag for sampling
        flags = f"{int(flags, 16) & 1:02x}"
    return trace_id, span_id, flags


def _is_wanted() -> bool:
    """Whether a collector is named; logs a warning if its URL cannot work."""
    environment = os.environ.get
    if not environment(ENDPOINT, "").strip():
        return False
    if environment("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environment("OTEL_TRACES_EXPORTER") == "none":
        return False
    protocol = environment("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol == "grpc":
        log.warning("traces are sent by HTTP, not by gRPC: %s must be the collector's HTTP port, often 4318", ENDPOINT)
    return True


def _otlp(service_name: str, version: str | None) -> Recorder:
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ[ENDPOINT]
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{ENDPOINT} must be a URL such as http://collector:4318")
    from batchwright.telemetry.otlp import Otlp

    return Otlp(service_name, version)


class _Silent:
    """Tracing is off: the span ignores all calls."""

    __slots__ = ()

    def set(self, attributes: Attributes) -> None: ...

    def error(self, error: BaseException) -> None: ...


class _Off(_Silent):
    """A span without a traceparent of its own: one object serves for all such spans."""

    __slots__ = ()

    @property
    def traceparent(self) -> str | None:
        return _handed.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None: ...


class _Handed(_Silent):
    """Passes on the traceparent that we received, as do the spans inside this one."""

    __slots__ = ("_current", "_token", "traceparent")

    def __init__(self, traceparent: str | None, current: bool = True) -> None:
        self.traceparent = traceparent
        self._current = current

    def __enter__(self) -> Self:
        if self._current:
            self._token = _handed.set(self.traceparent)
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if self._current:
            _handed.reset(self._token)


_OFF = _Off()
