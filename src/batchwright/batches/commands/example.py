"""`batchwright batch example`: a first file of requests, ready to run."""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import orjson
import typer

from batchwright.batches.plan.lines import DEFAULT_ENDPOINT, ENDPOINTS, why_refused
from batchwright.cli.stop import end_if_nobody_reads
from batchwright.errors import InvalidInput

COUNT_MAX = 50_000
_TOOLS = ("adze", "auger", "awl", "brace", "chisel", "gouge", "mallet", "plane", "rasp", "saw")
_SAMPLES_PER_SECOND = 8000
_AUDIO_SECONDS = 0.5


def example(
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of the requests.")] = "small",
    count: Annotated[int, typer.Option(min=1, max=COUNT_MAX, help="Number of requests.")] = 10,
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="Endpoint of the requests, such as /v1/embeddings.")
    ] = DEFAULT_ENDPOINT,
) -> None:
    """Print requests for a first batch: batchwright batch example > requests.jsonl

    Standard output gets nothing but the requests; what to do next is printed to standard error.
    """
    if endpoint not in ENDPOINTS:
        raise InvalidInput(f"--endpoint {why_refused(endpoint)}")
    make = _BODIES[endpoint]
    with end_if_nobody_reads():
        for number in range(count):
            body = {"model": model, **make(_TOOLS[number % len(_TOOLS)])}
            line = {"custom_id": f"request-{number + 1}", "method": "POST", "url": endpoint, "body": body}
            sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()
    typer.echo(_next_steps(model, endpoint), err=True)


def _next_steps(model: str, endpoint: str) -> str:
    file = "requests.jsonl"
    steps = [
        f"# Written to {file}, they can be checked and run:",
        f"batchwright batch check {file}",
        f"batchwright batch run {file} --url http://127.0.0.1:8000    # your model server, which has {model}",
    ]
    if not endpoint.startswith("/v1/audio/"):  # the simulator has no ears
        steps += [
            "# Without a model server, simulate one in a second terminal: batchwright simulate",
            f"batchwright batch run {file} --url http://127.0.0.1:9000",
        ]
    return "\n".join(steps)


def _silence() -> str:
    """Half a second of it, as the data URL of a WAV file."""
    size = int(_SAMPLES_PER_SECOND * _AUDIO_SECONDS)
    form = struct.pack("<HHIIHH", 1, 1, _SAMPLES_PER_SECOND, _SAMPLES_PER_SECOND, 1, 8)
    wave = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<I", len(form)) + form
    wave += b"data" + struct.pack("<I", size) + b"\x80" * size
    return f"data:audio/wav;base64,{base64.b64encode(wave).decode()}"


def _ask(tool: str) -> str:
    return f"In one sentence: what does a carpenter use the {tool} for?"


def _score(tool: str) -> dict[str, Any]:
    return {"text_1": _ask(tool), "text_2": [f"The {tool} is a tool.", "It will rain tomorrow."]}


def _rerank(tool: str) -> dict[str, Any]:
    return {"query": _ask(tool), "documents": [f"The {tool} is a tool.", "It will rain tomorrow."]}


def _listen(_: str) -> dict[str, Any]:
    return {"file_url": _silence()}


_BODIES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda tool: {"messages": [{"role": "user", "content": _ask(tool)}], "max_tokens": 60},
    "/v1/completions": lambda tool: {"prompt": f"A carpenter uses the {tool} to", "max_tokens": 60},
    "/v1/responses": lambda tool: {"input": _ask(tool), "max_output_tokens": 60},
    "/v1/embeddings": lambda tool: {"input": f"What a carpenter does with the {tool}."},
    "/v1/moderations": lambda tool: {"input": f"Hand me the {tool}, please."},
    "/v1/score": _score,
    "/score": _score,
    "/v1/rerank": _rerank,
    "/rerank": _rerank,
    "/v2/rerank": _rerank,
    "/v1/audio/transcriptions": _listen,
    "/v1/audio/translations": _listen,
}
