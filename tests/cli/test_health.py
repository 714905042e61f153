"""A worker's health page, and workers that detect that they are broken: real processes, real HTTP."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest

from tests.cli.conftest import SECONDS_MAX, Cli

GUARDED = str(Path(__file__).with_name("guarded.py"))
BROKEN = "the slots of all models do not add up: 1 more given back than taken"


class Page(NamedTuple):
    status: int
    type: str
    body: bytes


class Probe:
    """Requests pages like a kubelet."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, method: str = "GET") -> Page | None:
        """None if nothing listens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return Page(answer.status, answer.headers["content-type"], answer.read())
        except OSError:
            return None
        finally:
            connection.close()

    def until(self, path: str, status: int) -> dict[str, str]:
        deadline = time.monotonic() + SECONDS_MAX
        while (page := self.ask(path)) is None or page.status != status:
            assert time.monotonic() < deadline, page
            time.sleep(0.02)
        return orjson.loads(page.body)


@pytest.fixture
def guarded(cli: Cli) -> Cli:
    cli.environment |= {
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL": "http://127.0.0.1:9",
        "BATCHWRIGHT_WORKER_HEALTH_PORT": "0",
        "BATCHWRIGHT_DATABASE_FOLDER": str(cli.folder),
    }
    return cli


def two_free_ports() -> int:
    """The first of two neighbouring free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError, OverflowError):
            port = first.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@pytest.mark.thorough
def test_a_broken_worker_fails_its_probe_releases_its_jobs_and_exits_with_an_error(
    guarded: Cli,
) -> None:
    with guarded.start("worker", GUARDED) as worker:
        probe = Probe(int(worker.until(r"health on http://127\.0\.0\.1:(\d+)")[1]))
        held = guarded("job", "submit", "guarded.hold").stdout.strip()
        guarded.begun(held, "hold.began")
        for path in ("/healthz", "/readyz"):
            assert probe.until(path, 200)["status"] == "ok"
        page = probe.ask("/metrics")
        assert page is not None
        assert (page.status, page.type.split(";")[0]) == (200, "text/plain")
        lines = page.body.decode().splitlines()
        assert {f"batchwright_{one}" for one in ("workers 1.0", "this_worker_jobs 1.0", "database_up 1.0")} <= {*lines}
        guarded("job", "submit", "guarded.trip", "--wait")
        for path in ("/healthz", "/readyz"):
            assert BROKEN in probe.until(path, 503)["detail"]
        (guarded.folder / "go").touch()
        assert worker.ended() == 1
        worker.until(f"error: this worker is broken and must be restarted: {BROKEN}")
    assert guarded.rows("SELECT status::text, attempts FROM batchwright.job WHERE id = %s", held) == [("QUEUED", 0)]
    assert guarded.rows("SELECT id FROM batchwright.worker WHERE left_at IS NULL") == []


@pytest.mark.thorough
def test_a_supervisor_starts_a_broken_worker_again_and_every_process_has_the_next_port(guarded: Cli) -> None:
    (guarded.folder / "go").touch()
    port = two_free_ports()
    guarded.environment["BATCHWRIGHT_WORKER_HEALTH_PORT"] = str(port)
    probes = [Probe(port), Probe(port + 1)]
    with guarded.start("worker", "--processes", "2", GUARDED) as supervisor:
        for probe in probes:
            probe.until("/readyz", 200)
        before = {pid for (pid,) in guarded.rows("SELECT pid FROM batchwright.worker")}
        guarded("job", "submit", "guarded.trip", "--wait")
        supervisor.until("a worker process ended .exit code 1.")
        guarded.until("SELECT FROM batchwright.worker WHERE pid <> ALL (%s)", [*before])
        for probe in probes:
            probe.until("/readyz", 200)
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ended() == 0
