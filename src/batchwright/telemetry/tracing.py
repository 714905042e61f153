"""Traces for those who ask: spans go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, or nowhere.

While it is off, nothing of OpenTelemetry is imported, a span costs less than a microsecond, and a caller's traceparent
is handed on as it came. Whether it is on belongs to the process, as with logs; `batchwright.telemetry.otlp` does the
rest.

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
"""What is known about a span, by dotted names; what is None is left out."""

log = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NOBODY = {"0" * 32, "0" * 16}


class Span(Protocol):
    """A stretch of work; what is raised through it is recorded as its error."""

    @property
    def traceparent(self) -> str | None:
        """What to hand to whomever works for this span; while tracing is off, what was handed to us."""

    def set(self, attributes: Attributes) -> None: ...

    def error(self, error: BaseException) -> None:
        """Record a failure that is handled here, and so is not raised through the span."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The span ends, and what was raised goes on."""


class Recorder(Protocol):
    """Makes spans that are sent somewhere."""

    def span(self, name: str, parent: str | None, attributes: Attributes | None, current: bool) -> Span: ...

    def detached(self, name: str, link: str | None, attributes: Attributes | None) -> Span: ...

    def handed(self, traceparent: str | None) -> AbstractContextManager[object]: ...

    def current_traceparent(self) -> str | None: ...

    def stop(self) -> None: ...


_recorder: Recorder | None = None
_handed: contextvars.ContextVar[str | None] = contextvars.ContextVar("batchwright_traceparent", default=None)
"""While tracing is off: the traceparent that the innermost span was given."""


def start(service_name: str = "batchwright", version: str | None = None) -> bool:
    """Trace from now on if the environment asks for it; answers whether that is so.

    It never raises: who cannot trace says why in one line, and works without. OTEL_SERVICE_NAME goes before the name.
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
    """Send what is left and trace no more; takes two seconds at most, so call it last, and not in an event loop."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        atexit.unregister(stop)
        recorder.stop()


def span(name: str, *, parent: str | None = None, attributes: Attributes | None = None, current: bool = True) -> Span:
    """A span below `parent`, a W3C traceparent; without one, or with an invalid one, below the current span.

    Inside a generator say `current=False`: it runs in the context of whoever asks it, where it must change nothing.
    """
    if _recorder is not None:
        return _recorder.span(name, parent, attributes, current)
    return _OFF if parent is None else _Handed(parent, current)


def detached(name: str, link: str | None, *, attributes: Attributes | None = None) -> Span:
    """A span that begins a trace of its own and only refers to another, whose end or cancellation it outlives."""
    return _Handed(link) if _recorder is None else _recorder.detached(name, link, attributes)


def handed(traceparent: str | None) -> AbstractContextManager[object]:
    """Inside it, spans are below this one: for whoever works for a span that another task has begun."""
    return _Handed(traceparent) if _recorder is None else _recorder.handed(traceparent)


def current_traceparent() -> str | None:
    return _handed.get() if _recorder is None else _recorder.current_traceparent()


def incoming(headers: Mapping[str, str]) -> str | None:
    """The traceparent of a request, in the form of version 00; one that is invalid, or sent twice, is as good as none.

    Any mapping of names to values will do; one of Starlette's shows a header that came twice.
    """
    found = [value for name, value in headers.items() if name.lower() == "traceparent"]
    fields = parsed(found[0].strip(" \t")) if len(found) == 1 else None
    return None if fields is None else "00-{}-{}-{}".format(*fields)


def parsed(traceparent: str) -> tuple[str, str, str] | None:
    """Trace id, span id and flags in hexadecimal; None if that is no W3C traceparent."""
    found = _FIELDS.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not _NOBODY.isdisjoint((trace_id, span_id)):
        return None
    if version != "00":  # of a version to come we know one flag, whether it is sampled
        flags = f"{int(flags, 16) & 1:02x}"
    return trace_id, span_id, flags


def _is_wanted() -> bool:
    """Whether a collector is named; what would make its name useless is said."""
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
    """Tracing is off: what the span is told interests nobody."""

    __slots__ = ()

    def set(self, attributes: Attributes) -> None: ...

    def error(self, error: BaseException) -> None: ...


class _Off(_Silent):
    """Nobody handed us anything for this span: one object is all such spans."""

    __slots__ = ()

    @property
    def traceparent(self) -> str | None:
        return _handed.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None: ...


class _Handed(_Silent):
    """What was handed to us is handed on, also by the spans inside this one."""

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
