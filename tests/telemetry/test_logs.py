"""Log lines: their format, and the job that they belong to."""

import asyncio
import io
import logging
import socket
import sys

import orjson
import pytest
import uvicorn

from batchwright import AsyncBatchwright, NewJob
from batchwright.engine.outcomes import Settle
from batchwright.operations.registry import Registry
from batchwright.settings import DatabaseSettings
from batchwright.telemetry.logs import about, configure_logs, configured_logs, job_in_hand
from tests.support import make_settings, make_worker, put
from tests.telemetry import chatty

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
log = logging.getLogger("somebody.else")


@pytest.fixture
def logs():
    """Restore logging after the test, because it belongs to the whole process."""
    names = ["", "psycopg.pool", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture
def written(logs, monkeypatch):
    """The log lines in JSON, parsed."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs("INFO", "json")

    def lines(logger=None):
        found = [orjson.loads(line) for line in stream.getvalue().splitlines()]
        return [line for line in found if logger is None or line["logger"] == logger]

    lines.stream = stream
    return lines


class Held:
    id = "0190-1"
    job_type = "print"
    attempts = 2
    traceparent = TRACE


async def test_lines_of_a_foreign_logger_carry_their_own_job_when_twenty_run_at_once(pool, queue, written):
    operations = Registry(chatty.OPERATIONS)
    worker = make_worker(pool, *chatty.OPERATIONS, concurrency=20)
    new = [NewJob("chatty.async", traceparent=TRACE) for _ in range(10)] + [NewJob("chatty.thread") for _ in range(10)]
    ids = await put(queue, *new, operations=operations)
    assert await worker.run_once() == 20
    await worker.close()
    lines = written("somebody.else")
    assert len(lines) == 10 * 6 + 10 * 5
    assert {line["job_id"] for line in lines} == {str(id) for id in ids}
    for line in lines:
        assert line["message"] == f"I am {line['job_id']}"
        assert line["attempt"] == 1
        assert line.get("trace_id") == (TRACE[3:35] if line["job_type"] == "chatty.async" else None)
    own = written("batchwright.job.chatty.thread")
    assert len(own) == 10
    assert all(line["message"] == f"I am {line['job_id']}" and line["pages"] == 3 for line in own)


async def test_lines_of_a_cpu_operation_carry_its_job(database_url, queue, logs, capfd):
    configure_logs("INFO", "json")
    settings = make_settings(database=DatabaseSettings(url=database_url))
    async with AsyncBatchwright(settings=settings, operations=Registry.load(["tests.telemetry.chatty"])) as batchwright:
        worker = batchwright.worker()
        (id,) = await batchwright.enqueue([NewJob("chatty.cpu", traceparent=TRACE)])
        assert await worker.run_once() == 1
        await worker.close()
    lines = [orjson.loads(line) for line in capfd.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line["logger"] == "somebody.else"]
    assert line["message"] == f"I am {id}"
    assert (line["job_id"], line["job_type"], line["attempt"]) == (str(id), "chatty.cpu", 1)
    assert line["trace_id"] == TRACE[3:35]


async def test_the_engines_own_line_about_a_failure_names_the_job_and_not_its_payload(pool, queue, written):
    worker = make_worker(pool, *chatty.OPERATIONS)
    operations = Registry(chatty.OPERATIONS)
    (id,) = await put(queue, NewJob("chatty.fails", {"secret": "s3cret"}), operations=operations)
    await worker.run_once()
    await worker.close()
    (line,) = [line for line in written() if "failed" in line["message"]]
    assert (line["job_id"], line["job_type"], line["level"]) == (str(id), "chatty.fails", "warning")
    assert "s3cret" not in str(written())


async def test_lines_of_the_group_commit_do_not_carry_the_first_job(pool, queue, written):
    """The first settle starts the task that also commits the settles of other jobs."""
    worker = make_worker(pool, *chatty.OPERATIONS, concurrency=5)
    seen = []
    original = worker._runner._settler._commit

    async def commit(batch):
        seen.append(job_in_hand.get())
        await original(batch)

    worker._runner._settler._commit = commit
    await put(queue, *(NewJob("chatty.async") for _ in range(5)), operations=Registry(chatty.OPERATIONS))
    await worker.run_once()
    await worker.close()
    assert seen
    assert set(seen) == {None}


async def test_a_refused_result_is_logged_with_its_job(pool, queue, written):
    worker = make_worker(pool)
    await put(queue)
    claimed = await queue.claim_job("w1", (await queue.database.rows("SELECT id FROM batchwright.job"))[0][0], ["noop"])
    worker._runner._account(Settle("succeed", claimed, {}), None, False, True)
    (line,) = written()
    assert (line["job_id"], line["attempt"]) == (str(claimed.id), 1)
    assert worker.counts.total("writes_fenced_total") == 1
    await worker.close()


def test_extra_fields_are_in_json_lines(written):
    log.warning("low on %s", "paper", extra={"tray": 2, "left": 0.5, "who": {"a": 1}})
    (line,) = written()
    assert line["message"] == "low on paper"
    assert (line["level"], line["logger"]) == ("warning", "somebody.else")
    assert (line["tray"], line["left"], line["who"]) == (2, 0.5, {"a": 1})
    assert "job_id" not in line


def test_extra_fields_cannot_replace_the_standard_fields(written):
    log.warning("low", extra={"level": "all is well", "ts": 0, "logger": "me"})
    (line,) = written()
    assert (line["level"], line["logger"]) == ("warning", "somebody.else")
    assert line["ts"] != 0


@pytest.mark.parametrize("value", [2**70, "half \ud800", {1: 2}, float("nan"), object(), {1, 2}, "\u2028\x85"])
def test_no_value_makes_a_line_unreadable(written, value):
    log.warning("odd", extra={"value": value})
    (line,) = written()
    assert line["message"] == "odd"
    assert "value" in line


def test_a_line_about_another_job_keeps_that_job_and_not_the_running_one(written):
    reset = job_in_hand.set(Held())
    try:
        log.info("mine")
        log.info("yours", extra={"job_id": "0190-2"})
    finally:
        job_in_hand.reset(reset)
    mine, yours = written()
    assert (mine["job_id"], mine["job_type"], mine["attempt"]) == ("0190-1", "print", 2)
    assert yours["job_id"] == "0190-2"
    assert "job_type" not in yours


def test_text_lines_show_the_job_and_the_traceback(logs, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs("INFO", "text")
    reset = job_in_hand.set(Held())
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it broke")
    finally:
        job_in_hand.reset(reset)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(f"it broke  [job_id=0190-1 job_type=print attempt=2 trace_id={TRACE[3:35]}]")
    assert rest[-1] == "KeyError: 'x'"


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", TRACE.upper(), TRACE[:-3]])
def test_an_invalid_traceparent_gives_no_trace_id(traceparent):
    held = Held()
    held.traceparent = traceparent
    assert "trace_id" not in about(held)


def test_uvicorn_goes_through_the_same_handler_and_single_requests_only_at_debug(written, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written.stream)
    for name in ("uvicorn", "uvicorn.access"):  # uvicorn configures itself like this by default
        logging.getLogger(name).handlers = [logging.StreamHandler()]
        logging.getLogger(name).propagate = False
    configure_logs("INFO", "json")
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("uvicorn.access").info("GET /")
    assert [line["message"] for line in written()] == ["Started"]
    configure_logs("DEBUG", "json")
    logging.getLogger("uvicorn.access").info("GET /")
    assert written()[-1]["message"] == "GET /"


async def test_an_answer_that_was_cut_off_on_purpose_logs_no_error(written):
    async def cut(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    server = uvicorn.Server(uvicorn.Config(cut, http="httptools", ws="none", lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read()).endswith(b"half\r\n")
        writer.close()
        server.should_exit = True
        await serving
    assert [line["message"] for line in written() if line["level"] == "error"] == []


def test_children_get_the_configuration_of_the_logs(logs):
    logging.getLogger().handlers[:] = []
    assert configured_logs() is None
    configure_logs("warning", "json")
    assert configured_logs() == {"level": "WARNING", "form": "json"}
