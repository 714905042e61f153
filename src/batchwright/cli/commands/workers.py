"""`batchwright workers` and `batchwright operations`: worker processes, and what they can run."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, client, run
from batchwright.cli.show import age, ago, compact, console, print_facts, print_json, print_table, time_text
from batchwright.engine.jobs import DEFAULT_QUEUE, MAX_ATTEMPTS
from batchwright.engine.views import OperationView, WorkerView
from batchwright.errors import NotFound

_SAMPLES = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}

OperationName = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Show only this operation, with its payload.", show_default=False)
]


def workers(json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """List worker processes with their last heartbeat."""

    async def go() -> list[WorkerView]:
        async with client(database_url, config) as batchwright:
            return await batchwright.views.workers()

    found = run(go())
    if json:
        print_json(found)
    elif found:
        _print_workers(found)
    else:
        typer.echo("no workers; start one: batchwright up, or batchwright worker", err=True)


def operations(
    name: OperationName = None, json: Json = False, database_url: DatabaseUrl = None, config: Config = None
) -> None:
    """List operations that workers have published, or show one of them."""

    async def go() -> list[OperationView]:
        async with client(database_url, config) as batchwright:
            return await batchwright.views.operations()

    found = run(go())
    if name is not None:
        _show_operation(_find_operation(found, name), json)
    elif json:
        print_json(found)
    elif found:
        _print_operations(found)
    else:
        typer.echo("no operations; start a worker that has some: batchwright up hello.py", err=True)


def _print_workers(found: Sequence[WorkerView]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "host": [Text(one.host) for one in found],
            "pid": [Text(str(one.pid)) for one in found],
            "state": [_state(one) for one in found],
            "running": [Text(f"{one.running}/{one.concurrency}") for one in found],
            "heartbeat": [Text(ago(now, one.heartbeat_at)) for one in found],
            "up": [Text(age((now - one.started_at).total_seconds())) for one in found],
            "version": [Text(one.version) for one in found],
            "operations": [Text(str(len(one.operations))) for one in found],
            "queues": [Text("all" if one.queues is None else ", ".join(one.queues)) for one in found],
        },
        elastic=("queues",),
    )


def _state(worker: WorkerView) -> Text:
    if not worker.is_alive:
        return Text("silent", "red")
    return Text("alive", "green") if worker.stopping_at is None else Text("stopping", "yellow")


def _print_operations(found: Sequence[OperationView]) -> None:
    print_table(
        {
            "operation": [Text(one.name) for one in found],
            "tries": [Text(str(one.defaults.get("max_attempts", MAX_ATTEMPTS))) for one in found],
            "workers": [Text(str(one.workers), "" if one.workers else "yellow") for one in found],
            "queue": [Text(str(one.defaults.get("queue", DEFAULT_QUEUE))) for one in found],
            "description": [Text((one.description or "").partition("\n")[0]) for one in found],
        },
        elastic=("queue", "description"),
    )


def _find_operation(found: Sequence[OperationView], name: str) -> OperationView:
    for one in found:
        if one.name == name:
            return one
    close = difflib.get_close_matches(name, [one.name for one in found], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "start a worker that has it"
    raise NotFound(f"no worker has published the operation {name!r}; {hint}")


def _show_operation(operation: OperationView, json: bool) -> None:
    if json:
        print_json(operation)
        return
    defaults = operation.defaults
    print_facts(
        [
            ("operation", operation.name),
            ("description", operation.description),
            ("workers", operation.workers or Text("none alive", "yellow")),
            ("queue", f"{defaults.get('queue', DEFAULT_QUEUE)}, priority {defaults.get('priority')}"),
            ("tries", defaults.get("max_attempts")),
            ("key", ", ".join(defaults.get("exclusive_key") or ())),
            ("published", time_text(operation.published_at)),
        ]
    )
    if properties := operation.payload_schema.get("properties"):
        console().print()
        _print_payload(properties, operation.payload_schema.get("required", ()))
    typer.echo(f"\n{example_command(operation)}")


def _print_payload(properties: Mapping[str, Mapping[str, Any]], required: Sequence[str]) -> None:
    names = list(properties)
    print_table(
        {
            "payload": [Text(name) for name in names],
            "type": [Text(_type_text(properties[name])) for name in names],
            "default": [Text("required" if name in required else _default_text(properties[name])) for name in names],
            "description": [Text(str(properties[name].get("description", ""))) for name in names],
        },
        elastic=("type", "default", "description"),
    )


def _default_text(schema: Mapping[str, Any]) -> str:
    return compact(schema["default"]) if "default" in schema else ""


def _type_text(schema: Mapping[str, Any]) -> str:
    """The type of a field in a word or two: `string | null`, `array of integer`, `"a" | "b"`."""
    if "enum" in schema:
        return " | ".join(compact(value) for value in schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(_type_text(choice) for choice in choices)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if schema.get("type") == "array" and "items" in schema:
        return f"array of {_type_text(schema['items'])}"
    return str(schema.get("format") or schema.get("type") or "any")


def example_command(operation: OperationView) -> str:
    """A command that can be pasted, with a payload of the right shape."""
    schema = operation.payload_schema
    properties: Mapping[str, Any] = schema.get("properties", {})
    payload = {name: _sample_value(properties[name]) for name in schema.get("required", ()) if name in properties}
    words = f" --payload {shlex.quote(compact(payload))}" if payload else ""
    return f"batchwright job submit {shlex.quote(operation.name)}{words} --watch"


def _sample_value(schema: Mapping[str, Any]) -> Any:
    for known in ("examples", "enum"):
        if schema.get(known):
            return schema[known][0]
    return _SAMPLES.get(schema.get("type", ""))
