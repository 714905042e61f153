"""Spans as a real collector receives them. Tracing must never delay or raise, and must cost nothing when off."""

import asyncio
import contextlib
import gzip
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import timeit
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.datastructures import Headers

from batchwright.errors import NotFound, StorageUnavailable
from batchwright.storage import StorageSettings, Store
from batchwright.storage.local import Local
from batchwright.telemetry import tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"
ERROR = 2


class Sent:
    """A span as the collector received it."""

    def __init__(self, span, resource, scope) -> None:
        self.name = span.name
        self.trace_id, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.links = [f"{link.trace_id.hex()}-{link.span_id.hex()}" for link in span.links]
        self.attributes = _values(span.attributes)
        self.status = span.status
        self.events = [(event.name, _values(event.attributes)) for event in span.events]
        self.began, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.resource, self.scope = _values(resource.attributes), scope


def _values(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Collector(ThreadingHTTPServer):
    """A collector: OTLP over HTTP, on loopback."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.status = status
        self.requests = 0
        self.spans: list[Sent] = []
        self.news = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.news:
            self.requests += 1
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans += [Sent(span, resource.resource, scope.scope) for span in scope.spans]
            self.news.notify_all()

    def wait_for(self, n: int) -> list[Sent]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.spans) >= n, 20), [span.name for span in self.spans]
            return list(self.spans)

    def named(self, name: str) -> Sent:
        (found,) = [span for span in self.spans if span.name == name]
        return found


class _Request(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path.startswith("/v1/traces")
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def listening(status: int = 200):
    with Collector(status) as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Remove the developer's own OTEL variables, and turn tracing off after the test."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    tracing.stop()


@pytest.fixture
def collector(environment):
    with listening() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector
        tracing.stop()


@pytest.fixture
def traced(collector):
    """The collector of this process's spans; `stop()` first, then look."""
    assert tracing.start("batchwright", "1.2.3")
    return collector


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process."""
    begin = "import json, logging, sys, time\nfrom batchwright.telemetry import tracing\nlogging.basicConfig()\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    command = [sys.executable, "-W", "error", "-c", begin + textwrap.dedent(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


# Off --------------------------------------------------------------------------------------------------------------


def test_nothing_of_opentelemetry_is_imported_while_tracing_is_off():
    done = run("""
        import batchwright.app, batchwright.storage
        assert tracing.start("batchwright", "1") is False
        with tracing.span("a", attributes={"b": 1}) as span:
            span.set({"c": 2})
        with tracing.detached("d", None):
            pass
        tracing.stop()
        print([name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf"))])
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "TRUE"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_is_off_unless_the_environment_names_a_collector(environment, caplog, variables):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert tracing.start("batchwright", "1") is False
    assert caplog.records == []


def test_a_span_costs_hardly_anything_while_tracing_is_off():
    def one() -> None:
        with tracing.span("a", parent=PARENT, attributes={"b": 1}) as span:
            span.set({"c": 2})

    best = min(timeit.repeat(one, timer=time.thread_time, number=2_000, repeat=20)) / 2_000
    assert best < 3e-6, f"{best * 1e6:.2f} µs; it was 0.8 on the machine where this was written"


def test_while_tracing_is_off_a_callers_traceparent_is_passed_on_unchanged():
    assert tracing.current_traceparent() is None
    with tracing.span("alone") as alone:
        assert (alone.traceparent, tracing.current_traceparent()) == (None, None)
    with tracing.span("outer", parent="odd, but theirs") as outer:
        with tracing.span("inner") as inner:
            assert outer.traceparent == inner.traceparent == tracing.current_traceparent() == "odd, but theirs"
        with tracing.span("other", parent=PARENT) as other:
            assert other.traceparent == tracing.current_traceparent() == PARENT
        with tracing.detached("again", UNSAMPLED) as again:
            assert again.traceparent == tracing.current_traceparent() == UNSAMPLED
        with tracing.detached("alone", None) as alone:
            assert (alone.traceparent, tracing.current_traceparent()) == (None, None)
        with tracing.span("aside", parent=PARENT, current=False) as aside:
            assert (aside.traceparent, tracing.current_traceparent()) == (PARENT, "odd, but theirs")
        assert tracing.current_traceparent() == "odd, but theirs"
    assert tracing.current_traceparent() is None


def test_errors_pass_through_a_span_that_is_off():
    for span in (tracing.span("a"), tracing.span("a", parent=PARENT), tracing.detached("a", PARENT)):
        with pytest.raises(KeyError), span as held:
            held.error(ValueError("handled"))
            raise KeyError
    assert tracing.current_traceparent() is None


def test_missing_packages_are_one_warning_and_everything_else_works():
    done = run(
        """
        sys.modules["opentelemetry.sdk"] = None
        assert tracing.start("batchwright", "1") is False
        with tracing.span("a", parent="theirs") as span:
            print(span.traceparent)
        """,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert (done.returncode, done.stdout) == (0, "theirs\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "WARNING:batchwright.telemetry.tracing:OTEL_EXPORTER_OTLP_ENDPOINT is set, but tracing needs"
    )
    assert "pip install 'batchwright[otel]'" in line


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "user:secret@collector:4318"}, "must be a URL such as http://collector:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"}, "must be a URL such as http://collector:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[secret"}, "tracing stays off"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be"),
    ],
)
def test_settings_that_cannot_work_leave_tracing_off_with_one_warning(environment, caplog, variables, words):
    for name, value in variables.items():
        environment.setenv(name, value)
    before = threading.active_count()
    assert tracing.start("batchwright", "1") is False
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "secret" not in record.getMessage()
    assert threading.active_count() == before


def test_a_setting_for_grpc_gets_a_warning_that_only_http_is_supported(traced, environment, caplog):
    tracing.stop()
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert tracing.start("batchwright", "1")
    (record,) = caplog.records
    assert "by HTTP, not by gRPC" in record.getMessage()


# On ---------------------------------------------------------------------------------------------------------------


def test_spans_nest_by_context_and_say_who_sent_them(traced):
    with tracing.span("outer", attributes={"batch.id": "b-1", "n": 3, "share": 0.5, "is": True}) as outer:
        with tracing.span("inner") as inner:
            assert tracing.current_traceparent() == inner.traceparent != outer.traceparent
        assert tracing.current_traceparent() == outer.traceparent
        with tracing.span("second"):
            pass
        outer.set({"batch.request.total": 7, "nothing": None})
    assert tracing.current_traceparent() is None
    tracing.stop()
    outer, inner, second = map(traced.named, ("outer", "inner", "second"))
    assert inner.parent == second.parent == outer.id
    assert outer.parent == ""
    assert inner.trace_id == second.trace_id == outer.trace_id
    assert outer.attributes == {"batch.id": "b-1", "n": 3, "share": 0.5, "is": True, "batch.request.total": 7}
    assert outer.status.code == 0
    assert outer.began <= inner.began <= inner.ended <= outer.ended
    assert (outer.resource["service.name"], outer.resource["service.version"]) == ("batchwright", "1.2.3")
    assert (outer.scope.name, outer.scope.version) == ("batchwright", "1.2.3")


def test_a_span_hangs_below_the_traceparent_that_it_is_given(traced):
    with tracing.span("current"), tracing.span("given", parent=PARENT) as given:
        _, trace_id, id, flags = given.traceparent.split("-")
        assert (trace_id, flags) == (TRACE, "01")
        assert id != SPAN
        with tracing.span("below"):
            pass
    tracing.stop()
    given, below = traced.named("given"), traced.named("below")
    assert (given.trace_id, given.parent, given.id) == (TRACE, SPAN, id)
    assert (below.trace_id, below.parent) == (TRACE, id)
    assert traced.named("current").trace_id != TRACE


@pytest.mark.parametrize("parent", ["", "nonsense", PARENT.upper(), f"00-{'0' * 32}-{SPAN}-01", PARENT + "-more"])
def test_an_invalid_parent_is_ignored(traced, parent):
    with tracing.span("current"), tracing.span("given", parent=parent):
        pass
    tracing.stop()
    assert traced.named("given").parent == traced.named("current").id


def test_a_trace_that_the_caller_does_not_sample_is_not_sent_but_passed_on(traced):
    with tracing.span("a", parent=UNSAMPLED) as a, tracing.span("b") as b:
        assert a.traceparent.startswith(f"00-{TRACE}-")
        assert a.traceparent.endswith("-00")
        assert b.traceparent.endswith("-00")
        b.set({"c": 1})
        b.error(ValueError())
    with tracing.span("sampled", parent=PARENT):
        pass
    tracing.stop()
    assert [span.name for span in traced.spans] == ["sampled"]


def test_the_sdks_own_variables_are_obeyed(collector, environment):
    environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    environment.setenv("OTEL_SERVICE_NAME", "night-batches")
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=9,deployment.environment.name=test")
    environment.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    assert tracing.start("batchwright", "1.2.3")
    with tracing.span("root") as root:
        assert root.traceparent.endswith(("-00", "-02"))  # not sampled; 02 says that the id is random
    with tracing.span("sampled", parent=PARENT):
        pass
    tracing.stop()
    (sent,) = collector.spans
    assert sent.name == "sampled"
    wanted = {"service.name": "night-batches", "service.version": "9", "deployment.environment.name": "test"}
    assert {name: sent.resource[name] for name in wanted} == wanted


def test_an_exception_in_a_span_is_recorded_once_as_its_error(traced):
    with pytest.raises(LookupError), tracing.span("outer"), tracing.span("raised") as span:
        try:
            raise LookupError("no such line")
        except LookupError as error:
            span.error(error)
            raise
    with tracing.span("handled") as span:
        span.error(ValueError("first"))
        span.error(ValueError("second"))
    with pytest.raises(asyncio.CancelledError), tracing.span("cancelled"):
        raise asyncio.CancelledError
    tracing.stop()
    for name in ("raised", "outer"):
        sent = traced.named(name)
        assert (sent.status.code, sent.status.message) == (ERROR, "no such line")
        words = {"exception.type": "LookupError", "exception.message": "no such line"}
        assert sent.events == [("exception", words)]
    handled = traced.named("handled")
    assert [event["exception.message"] for _, event in handled.events] == ["first", "second"]
    assert handled.status.code == ERROR
    cancelled = traced.named("cancelled")
    assert (cancelled.status.code, cancelled.status.message) == (ERROR, "CancelledError")


def test_an_exception_without_a_printable_message_is_raised_unchanged(traced):
    class Speechless(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    with pytest.raises(Speechless), tracing.span("a"):
        raise Speechless
    tracing.stop()
    assert (traced.named("a").status.code, traced.named("a").status.message) == (ERROR, Speechless.__qualname__)


async def test_tasks_and_threads_keep_their_spans_apart(traced):
    meeting = asyncio.Barrier(10)

    def in_thread(n: int) -> None:
        with tracing.span(f"thread-{n}"):
            pass

    async def work(n: int) -> None:
        with tracing.span(f"task-{n}"):
            await meeting.wait()
            with tracing.span(f"inner-{n}"):
                await meeting.wait()
                await asyncio.to_thread(in_thread, n)

    with tracing.span("root"):
        await asyncio.gather(*map(work, range(10)))
    await asyncio.to_thread(tracing.stop)
    assert len(traced.spans) == 31
    for n in range(10):
        task, inner, thread = (traced.named(f"{kind}-{n}") for kind in ("task", "inner", "thread"))
        assert (thread.parent, inner.parent, task.parent) == (inner.id, task.id, traced.named("root").id)


async def test_a_detached_span_outlives_the_cancellation_of_what_it_refers_to(traced):
    running, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    after: list[asyncio.Task[None]] = []

    async def re_enqueue(link: str | None) -> None:
        with tracing.detached("re-enqueue", link, attributes={"batch.id": "b"}), tracing.span("below"):
            begun.set()
            await go_on.wait()

    async def process() -> None:
        with tracing.span("process-batch", parent=PARENT) as span:
            try:
                running.set()
                await asyncio.Event().wait()
            finally:
                after.append(asyncio.create_task(re_enqueue(span.traceparent)))
                await asyncio.shield(after[0])

    task = asyncio.create_task(process())
    await running.wait()
    task.cancel()
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await after[0]
    await asyncio.to_thread(tracing.stop)
    batch, again, below = map(traced.named, ("process-batch", "re-enqueue", "below"))
    assert again.parent == ""
    assert again.trace_id != batch.trace_id == TRACE
    assert again.links == [f"{batch.trace_id}-{batch.id}"]
    assert below.parent == again.id
    assert again.ended > batch.ended
    assert (batch.status.code, again.status.code) == (ERROR, 0)
    assert again.attributes == {"batch.id": "b"}


def test_a_detached_span_may_refer_to_nothing(traced):
    with tracing.span("current"):
        for link in (None, "nonsense"):
            with tracing.detached(f"to {link}", link):
                pass
    tracing.stop()
    for name in ("to None", "to nonsense"):
        assert (traced.named(name).parent, traced.named(name).links) == ("", [])


def test_a_value_that_cannot_be_sent_does_not_affect_other_spans(traced):
    odd = {"half": "a\udc80b", "long": "x" * 5_000, "large": 2**70, "small": -(2**70), "nul": "\x00"}
    with pytest.raises(OSError), tracing.span("odd", attributes=odd) as span:
        span.set({"later": "\ud800"})
        raise OSError("\udcff" + "y" * 5_000)
    with tracing.span("other"):
        pass
    tracing.stop()
    traced.named("other")
    sent = traced.named("odd")
    assert sent.attributes == {
        "half": "a\\udc80b",
        "later": "\\ud800",
        "long": "x" * 1_000,
        "large": str(2**70),
        "small": str(-(2**70)),
        "nul": "\x00",
    }
    assert sent.status.message == "\\udcff" + "y" * 999


def test_spans_of_instrumented_libraries_are_nested_correctly_and_the_global_provider_is_not_ours(traced):
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
    with tracing.span("ours") as ours:
        theirs = trace.get_current_span().get_span_context()
        assert f"{theirs.trace_id:032x}-{theirs.span_id:016x}" in ours.traceparent
    somebody = trace.NonRecordingSpan(
        trace.SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    with trace.use_span(somebody), tracing.span("below"):
        pass
    tracing.stop()
    assert (traced.named("below").trace_id, traced.named("below").parent) == (TRACE, SPAN)


def test_spans_are_sent_as_time_goes_by(collector, environment):
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracing.start("batchwright", "1")
    for n in range(3):
        with tracing.span(f"span-{n}"):
            pass
        collector.wait_for(n + 1)
    tracing.stop()
    assert [span.name for span in collector.spans] == ["span-0", "span-1", "span-2"]


def test_it_can_be_started_and_stopped_again_and_again(collector):
    before = set(threading.enumerate())
    for n in range(3):
        assert tracing.start("batchwright", "1")
        assert tracing.start("another", "2")  # it is on already
        with tracing.span(f"span-{n}"):
            pass
        left_open = tracing.span(f"open-{n}")
        left_open.__enter__()
        tracing.stop()
        tracing.stop()
        left_open.__exit__(None, None, None)
        with tracing.span("after the end") as off:
            assert off.traceparent is None
    assert [span.name for span in collector.spans] == ["span-0", "span-1", "span-2"]
    assert {span.resource["service.name"] for span in collector.spans} == {"batchwright"}
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread
    assert not any(logging.getLogger(name).filters for name in ("urllib3.connectionpool", "opentelemetry.sdk.trace"))


def test_a_process_that_exits_without_stopping_tracing_still_delivers_its_spans(collector):
    done = run(
        """
        assert tracing.start("batchwright", "1")
        with tracing.span("a"), tracing.span("b"):
            pass
        """,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [span.name for span in collector.spans] == ["b", "a"]


# The collector fails ----------------------------------------------------------------------------------------------

MANY = """
    assert tracing.start("batchwright", "1")
    longest = 0.0
    for n in range(5000):
        began = time.perf_counter()
        with tracing.span("a", attributes={"n": n}):
            pass
        longest = max(longest, time.perf_counter() - began)
    began = time.perf_counter()
"""
STOPPED = (
    MANY
    + """
    tracing.stop()
    print(json.dumps([longest, time.perf_counter() - began]))
    sys.stdout.flush()
    logging.shutdown()
    import os
    os._exit(0)
"""
)
LEFT = (
    """
    import atexit
    atexit.register(lambda: print(json.dumps([longest, time.perf_counter() - began])))  # after what comes later
"""
    + MANY
)


@pytest.fixture(params=["nobody listens", "never answers"])
def ill(request):
    with socket.create_server(("127.0.0.1", 0)) if request.param == "never answers" else socket.socket() as held:
        if request.param == "nobody listens":
            held.bind(("127.0.0.1", 0))  # the port is held, so connections to it are refused
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.thorough
@pytest.mark.parametrize("program", [STOPPED, LEFT], ids=["stopped", "left"])
def test_a_failing_collector_delays_nothing_and_is_logged_once(ill, program):
    done = run(program, OTEL_EXPORTER_OTLP_ENDPOINT=ill)
    assert done.returncode == 0, done.stderr
    longest, leaving = json.loads(done.stdout)
    assert longest < 1.5  # a busy machine takes tenths of a second; one attempt to send would take several seconds
    assert leaving <= 2.0
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING:batchwright.telemetry.otlp:spans are lost: ")


def test_a_process_exits_at_once_when_there_is_nothing_to_send(ill):
    done = run(
        """
        tracing.start("batchwright", "1")
        began = time.perf_counter()
        tracing.stop()
        print(time.perf_counter() - began)
        """,
        OTEL_EXPORTER_OTLP_ENDPOINT=ill,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 0.5


def test_spans_beyond_the_queue_are_dropped_and_that_is_logged_once(environment, caplog):
    with socket.create_server(("127.0.0.1", 0)) as held:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
        environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
        tracing.start("batchwright", "1")
        for _ in range(100):
            with tracing.span("a"):
                pass
        (record,) = caplog.records
        assert record.getMessage().startswith("spans are lost: they come faster than the collector accepts them;")
        tracing.stop()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("status", [400, 401, 404])
def test_the_warning_about_a_collector_that_refuses_has_its_status_but_not_its_address(environment, caplog, status):
    with listening(status) as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces?key=secret")
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1/secret")
        environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
        tracing.start("batchwright", "1")
        for _ in range(20):
            with tracing.span("a"):
                pass
        tracing.stop()
        assert collector.requests > 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"spans are lost: the collector answers with {status};")
    assert "secret" not in caplog.text


def test_a_sender_that_raises_is_one_warning_and_later_spans_are_sent(collector, environment, caplog):
    raised, real = threading.Event(), OTLPSpanExporter.export

    def raises_first(self, spans):
        if raised.is_set():
            return real(self, spans)
        raised.set()
        raise RuntimeError("an odd span")

    environment.setattr(OTLPSpanExporter, "export", raises_first)
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracing.start("batchwright", "1")
    with tracing.span("first"):
        pass
    assert raised.wait(20)
    with tracing.span("second"):
        pass
    tracing.stop()
    assert [span.name for span in collector.spans] == ["second"]
    (record,) = caplog.records
    assert record.getMessage().startswith("spans are lost: sending failed with RuntimeError;")


def test_log_lines_of_the_sdk_about_spans_of_others_are_still_shown(traced, caplog):
    logger = logging.getLogger("opentelemetry.sdk._shared_internal")
    assert logger.filters
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("theirs")
    assert [record.getMessage() for record in caplog.records] == ["theirs"]


# Storage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    local = Local(tmp_path / "files")
    local.part_bytes = 1_000
    return Store(local, StorageSettings(attempts=1))


async def test_calls_of_the_store_are_spans(traced, store, tmp_path):
    file = tmp_path / "upload"
    file.write_bytes(b"f" * 300)
    with tracing.span("process-batch"):
        await store.put("a/put", b"p" * 2_500)
        await store.put("a/new", b"n" * 20)
        await store.put_file("a/file", file)
        assert len([part async for part in store.get("a/put")]) == 3
        assert await store.read("a/put", 2_490, 100) == b"p" * 10
        await store.delete("a/put", "a/none")
        await store.delete()
        assert await store.head("a/put") is None
        assert [found.key async for found in store.list()] == ["a/file", "a/new"]
    await asyncio.to_thread(tracing.stop)
    root = traced.named("process-batch")
    assert {span.parent for span in traced.spans if span is not root} == {root.id}
    assert [(span.name, span.attributes) for span in traced.spans if span is not root] == [
        ("storage.Store", {"storage.key": "a/put", "storage.bytes": 2_500}),
        ("storage.Store", {"storage.key": "a/new", "storage.bytes": 20}),
        ("storage.Store", {"storage.key": "a/file", "storage.bytes": 300}),
        ("storage.Retrieve", {"storage.key": "a/put", "storage.bytes": 2_500}),
        ("storage.Retrieve", {"storage.key": "a/put", "storage.bytes": 10}),
        ("storage.Delete", {"storage.key": "a/put", "storage.keys": 2}),
    ]
    assert {span.status.code for span in traced.spans} == {0}


async def test_failures_of_the_store_are_errors_of_its_spans(traced, store, monkeypatch):
    async def fails(*_: object, **__: object) -> None:
        raise StorageUnavailable("the disk is away")

    with pytest.raises(NotFound):
        await store.read("missing", 0, 1)
    for method in ("write", "adopt", "delete", "head"):
        monkeypatch.setattr(store._backend, method, fails)
    calls = [
        store.put("a", b"1"),
        store.put_file("a", Path(__file__)),
        store.delete("a"),
        store.read("a", 0, 1),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailable):
            await call
    await asyncio.to_thread(tracing.stop)
    first, *others = traced.spans
    assert (first.name, first.status.message) == ("storage.Retrieve", "there is no object missing")
    assert [span.name.removeprefix("storage.") for span in others] == ["Store"] * 2 + ["Delete", "Retrieve"]
    assert {(span.status.code, span.status.message) for span in others} == {
        (ERROR, "the disk is away (attempt 1 of 1)")
    }
    assert "storage.bytes" not in others[0].attributes


async def test_a_reader_keeps_his_own_current_span_and_may_stop_early(traced, store):
    await store.put("a", b"x" * 3_000)
    with tracing.span("reader") as reader:
        parts = store.get("a")
        await anext(parts)
        assert tracing.current_traceparent() == reader.traceparent
        with tracing.span("between"):
            await anext(parts)
        assert tracing.current_traceparent() == reader.traceparent
    await asyncio.create_task(parts.aclose())
    await asyncio.to_thread(tracing.stop)
    retrieve = traced.named("storage.Retrieve")
    assert retrieve.parent == traced.named("between").parent == traced.named("reader").id
    assert retrieve.attributes["storage.bytes"] == 2_000
    assert (retrieve.status.code, retrieve.events) == (0, [])


async def test_the_store_makes_no_trace_of_its_own_while_tracing_is_off(store):
    with tracing.span("job", parent=PARENT):
        await store.put("a", b"x" * 3_000)
        async for _ in store.get("a"):
            assert tracing.current_traceparent() == PARENT
        await store.delete("a")
        assert tracing.current_traceparent() == PARENT


# Incoming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (PARENT, PARENT),
        (UNSAMPLED, UNSAMPLED),
        (f" {PARENT}\t", PARENT),
        (f"00-{TRACE}-{SPAN}-ff", f"00-{TRACE}-{SPAN}-ff"),
        (f"cc-{TRACE}-{SPAN}-03", PARENT),
        (f"cc-{TRACE}-{SPAN}-01-what-comes", PARENT),
        (f"cc-{TRACE}-{SPAN}-01.", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-what-comes", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN[1:]}-01", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"0-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-0g", None),
        (f"00_{TRACE}_{SPAN}_01", None),
        (PARENT.upper(), None),
        (PARENT + "\n", None),
        ("x" + PARENT, None),
        ("\u0660\u0660" + PARENT[2:], None),  # digits, but not ASCII ones
        ("", None),
        ("a" * 100_000, None),
    ],
)
def test_a_traceparent_of_a_request_is_used_if_it_is_valid(sent, taken):
    assert tracing.incoming({"traceparent": sent}) == taken
    assert tracing.incoming({"accept": "*/*", "TraceParent": sent}) == taken


def test_a_request_without_a_traceparent_or_with_two_has_none():
    assert tracing.incoming({}) is None
    assert tracing.incoming({"tracestate": PARENT}) is None
    one = (b"traceparent", PARENT.encode())
    assert tracing.incoming(Headers(raw=[one])) == PARENT
    assert tracing.incoming(Headers(raw=[one, one])) is None
