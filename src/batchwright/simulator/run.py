"""Simulators for tests and benchmarks: one in this event loop, or one in a process of its own."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

from batchwright.errors import ConfigurationError
from batchwright.simulator.profiles import Profile
from batchwright.simulator.server import Simulator, SimulatorSettings

_STOP_SECONDS = 10.0


@asynccontextmanager
async def running(
    settings: SimulatorSettings | None = None, *, port: int = 0, **values: Any
) -> AsyncIterator[Simulator]:
    """A simulator in this loop, on a free port. Without settings it accepts any model and answers immediately.

    >>> async with running(faults=["500:0.1"]) as simulator:
    ...     await send(simulator.url + "/v1/chat/completions")
    """
    if settings is None:
        any_model = None if "models" in values else Profile(max_running=100_000)
        settings = SimulatorSettings(**{"any_model": any_model, **values})
    simulator = await Simulator(settings).open(port=port)
    try:
        yield simulator
    finally:
        await simulator.close()


class Remote:
    """A simulator in a process of its own, controlled over HTTP."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], api_key: str | None) -> None:
        self.url = url
        self.process = process
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def stats(self) -> dict[str, Any]:
        return self.call("GET", "/simulator/stats")

    def asked(self, *, over: int = 0, by: str = "body", limit: int = 1000) -> dict[str, Any]:
        return self.call("GET", f"/simulator/asked?over={over}&by={by}&limit={limit}")

    def put_faults(self, rules: Sequence[str]) -> None:
        self.call("POST", "/simulator/faults", {"faults": list(rules)})

    def change(self, model: str, **values: Any) -> None:
        self.call("POST", "/simulator/models", {"model": model, **values})

    def reset(self) -> None:
        self.call("POST", "/simulator/reset")

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            answer = connection.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise ConfigurationError(f"{method} {path} failed with status {answer.status}: {found}")
        return found


@contextmanager
def running_process(*arguments: str, api_key: str | None = None) -> Iterator[Remote]:
    """`batchwright simulate` with these arguments on a free port; it ends with this process, however that ends.

    >>> with running_process("--model", "qwen:fast", "--fault", "503:0.01") as simulator:
    ...     print(simulator.url, simulator.stats()["received"])
    """
    ours, theirs = socket.socketpair()
    key = ["--api-key", api_key] if api_key else []
    command = [sys.executable, "-P", "-m", "batchwright", "simulate", "--port", "0", "--json", *key, *arguments]
    tether = ["--tether", str(theirs.fileno())]
    with (
        ours,
        subprocess.Popen(  # noqa: S603 - our own program
            [*command, *tether], stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        ) as process,
    ):
        theirs.close()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ConfigurationError(f"batchwright simulate exited with {process.wait()}: {' '.join(arguments)}")
            yield Remote(json.loads(line)["url"], process, api_key)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
