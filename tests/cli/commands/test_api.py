"""`batchwright api`, and the HTTP server of `batchwright up`, as processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.cli.conftest import SAMPLE, SECONDS_MAX, Cli, Running

WORKERS = "SELECT pid FROM batchwright.worker"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def serving(cli: Cli, *arguments: str) -> Iterator[tuple[Running, httpx.Client]]:
    """The command beside the test, and a client once it answers."""
    port = free_port()
    with (
        cli.start(*arguments, "--port", str(port)) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            try:
                if http.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert running.process.poll() is None, "it ended before it answered"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield running, http


@pytest.mark.thorough
def test_up_goes_on_serving_when_its_worker_is_killed_and_the_job_ends(cli: Cli) -> None:
    cli.environment["BATCHWRIGHT_ENGINE_LEASE_SECONDS"] = "1"
    with serving(cli, "up", SAMPLE) as (up, http):
        ((first,),) = cli.until(WORKERS)
        id = http.post("/v1/jobs", json={"job_type": "sample.slow", "payload": {"seconds": 1.5}}).json()["id"]
        cli.begun(id, "job.started")
        os.kill(first, signal.SIGKILL)
        assert http.get("/healthz").status_code == 200
        with http.stream("GET", f"/v1/jobs/{id}/events/stream", timeout=SECONDS_MAX) as stream:
            said = stream.read().decode()
        assert '"job.rescued"' in said
        assert '"job.succeeded"' in said
        assert "event: end" in said
        assert http.get(f"/v1/jobs/{id}").json()["status"] == "SUCCEEDED"
        up.signal(signal.SIGTERM)
        assert up.ended() == 0


@pytest.mark.thorough
def test_an_open_stream_does_not_keep_the_server_from_leaving(cli: Cli) -> None:
    with serving(cli, "api") as (api, http):
        cli.rows(
            "INSERT INTO batchwright.operation (name, payload_schema, defaults, published_at, published_by) "
            "VALUES ('later', '{}', %s, now(), 'nobody') RETURNING name",
            '{"queue": "default", "priority": 5, "max_attempts": 3, "exclusive_key": [], "on_held": "queue"}',
        )
        id = http.post("/v1/jobs", json={"job_type": "later"}).json()["id"]
        with http.stream("GET", f"/v1/jobs/{id}/events/stream", timeout=SECONDS_MAX) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if "job.enqueued" in line)
            api.signal(signal.SIGTERM)
            assert api.ended() == 0


def test_from_the_first_key_on_nobody_gets_in_without_one(cli: Cli) -> None:
    with serving(cli, "api") as (_, http):
        assert http.get("/v1/jobs").status_code == 200
        secret = cli("key", "create", "desk").stdout.strip()
        assert http.get("/v1/jobs").status_code == 401
        http.headers["Authorization"] = f"Bearer {secret}"
        assert http.get("/v1/jobs").status_code == 200
        assert http.get("/v1/workers").status_code == 403


@pytest.mark.parametrize("command", ["api", "up"])
def test_without_a_key_only_a_loopback_address_is_served(cli: Cli, command: str) -> None:
    said = cli(command, "--host", "0.0.0.0", code=1).stderr
    assert "without a key the server listens only on a loopback address, not on 0.0.0.0" in said
    assert "batchwright key create" in said


def test_a_port_that_is_taken_is_said_with_its_remedy(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = cli("api", "--port", str(port), code=1).stderr
    assert f"port {port} is in use by " in said
    assert "--port" in said
