"""Every name that users build on, as lines of text: Python, HTTP, the command line, settings, metrics and the schema.

`tests/surface.json` holds the promised lines, and tests/test_surface.py compares them with the current ones. After
adding something on purpose, renew the file: `python -m tests.surface > tests/surface.json`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib
import inspect
import json
import os
import sys
import tempfile
import typing
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

import batchwright
from batchwright import AsyncBatchwright, errors, testing
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.settings import PREFIX, is_table, load_settings
from batchwright.telemetry.metrics import Metric

Surface = dict[str, list[str]]
LIST = Path(__file__).with_name("surface.json")

# Names of AsyncBatchwright that were never documented and have moved to the part of batches or to Core
# (`adopt`, for our own programs that already have a pool, is now `use_pool`).
_MOVED = {"adopt", "batch_runtime", "files", "open_store", "runtime", "seal", "workspace"}
# Names that it had before they moved to Core. Other names of Core are for parts only and not promised to users.
_FROM_CORE = {
    "bulk", "catalog", "doorbell", "folder", "keys", "pool", "queue", "schedules", "store", "views",
}  # fmt: skip
# Classes whose objects users get, but do not create.
_OURS_TO_MAKE = (
    batchwright.AsyncBatch, batchwright.AsyncBatches, batchwright.Batch, batchwright.BatchProgress,
    batchwright.Batches, batchwright.Context, batchwright.RequestError,
)  # fmt: skip
# Errors that the HTTP API raises; users see them as 401 and 403.
_OF_THE_GATE = {"Forbidden", "Unauthorized"}


async def surface(database_url: str) -> Surface:
    """All lines, sorted, on a migrated database."""
    document, pages = await _served(database_url)
    found = {
        "python": python(),
        "http": http(document),
        "command line": command_line(),
        "settings": settings(),
        "metrics": metrics(pages),
        "sql": await sql(database_url),
    }
    return {name: sorted(set(lines)) for name, lines in found.items()}


# Python -----------------------------------------------------------------------------------------------------------


def python() -> Iterator[str]:
    for name in batchwright.__all__:
        yield from _described(name, getattr(batchwright, name))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception) and name not in _OF_THE_GATE:
            yield from _described(f"errors.{name}", value)
    for name, value in vars(testing).items():
        if not name.startswith("_") and getattr(value, "__module__", None) == testing.__name__:
            yield from _described(f"testing.{name}", value)


def _described(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}" if callable(value) and not hasattr(value, "__supertype__") else name
    elif typing.is_typeddict(value):
        yield from (f"{name}[{key!r}]" for key in value.__annotations__)
    elif issubclass(value, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in value)
    else:
        made = "" if value in _OURS_TO_MAKE else _signature(value)
        yield f"{name}{made} is a {' and a '.join(base.__name__ for base in _public_bases(value))}"
        yield from _members(name, value)


def _public_bases(kind: type) -> Iterable[type]:
    """The bases that users can rely on: `object` and exceptions. Other bases are internal."""
    return [base for base in kind.__mro__[1:] if base is object or issubclass(base, BaseException)]


def _members(name: str, kind: type) -> Iterator[str]:
    members = set(dir(kind)) - set(dir(Exception))
    if kind is AsyncBatchwright:
        members &= (set(vars(kind)) | _FROM_CORE) - _MOVED
    for member in members:
        if member.startswith("_"):
            continue
        value = getattr(kind, member)
        yield f"{name}.{member}{_signature(value) if callable(value) else ''}"


def _signature(function: Any) -> str:
    """Names, order and defaults; without annotations, because these name internal classes, which may be renamed."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    parameters = [
        one.replace(annotation=inspect.Parameter.empty, default=_plain(one.default))
        for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _plain(default: Any) -> Any:
    """A default value in a form that prints the same in every process."""
    is_plain = default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | None)
    return default if is_plain else type(default).__name__


# HTTP -------------------------------------------------------------------------------------------------------------


async def _served(database_url: str) -> tuple[dict[str, Any], list[str]]:
    """The OpenAPI document of a real server, and the pages of metrics of a server and of a worker."""
    tables = {"database": {"url": database_url}, "api": {"port": 0}, "worker": {"health_port": 0}}
    async with AsyncBatchwright(settings=load_settings(tables, environment={})) as client:
        worker = client.worker()
        health, server = client.health(worker), await client.server()
        assert health is not None
        await health.start()
        server.start()
        try:
            places = (f"{server.url}/openapi.json", f"{server.url}/metrics", f"{health.url}/metrics")
            document, *pages = [await asyncio.to_thread(_read, place) for place in places]
        finally:
            await server.close()
            await health.close()
            await worker.close()
    return json.loads(document), pages


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def http(document: dict[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield from (f"{method.upper()} {path}{line}" for line in _route(route))
    for name, schema in document["components"]["schemas"].items():
        yield from (f"{name}{line}" for line in _object(schema))


def _route(route: dict[str, Any]) -> Iterator[str]:
    yield ""
    for one in route.get("parameters", ()):
        yield f" takes {one['name']} in {one['in']}{' (required)' if one.get('required') else ''}"
    for kind, content in route.get("requestBody", {}).get("content", {}).items():
        yield f" takes {kind}: {_kind(content.get('schema', {}))}"
    for status, answer in route["responses"].items():
        kinds = [f"{kind}: {_kind(content.get('schema', {}))}" for kind, content in answer.get("content", {}).items()]
        yield f" answers {status} {', '.join(kinds)}".rstrip()


def _object(schema: dict[str, Any]) -> Iterator[str]:
    yield f" is {schema.get('type', 'anything')}"
    yield from (f" may be {value!r}" for value in schema.get("enum", ()))
    for name, one in schema.get("properties", {}).items():
        yield f".{name}: {_kind(one)}{' (required)' if name in schema.get('required', ()) else ''}"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(_kind(one) for one in choices)
    if "enum" in schema or "const" in schema:
        return " | ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"[{_kind(schema.get('items', {}))}]"
    return str(schema.get("type", "anything"))


# The command line -------------------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    app = importlib.import_module("batchwright.commands").app
    yield from _command(typer.main.get_command(app), "batchwright")


def _command(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """Commands are loaded when they are called; the context that a command makes holds the loaded one."""
    context = command.make_context(name.split()[-1], [], parent, resilient_parsing=True)
    yield f"{name}{' (hidden)' if command.hidden else ''}"
    for parameter in context.command.get_params(context):
        yield f"{name} {_parameter(parameter)}"
    for inner in context.command.list_commands(context) if hasattr(context.command, "list_commands") else ():
        yield from _command(context.command.get_command(context, inner), f"{name} {inner}", context)


def _parameter(parameter: Any) -> str:
    needed = " (required)" if parameter.required else ""
    several = " (repeated)" if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ""
    if parameter.param_type_name == "argument":
        return f"{parameter.name}{needed}{several}"
    value = "" if getattr(parameter, "is_flag", False) else " VALUE"
    return f"{' '.join(sorted([*parameter.opts, *parameter.secondary_opts]))}{value}{needed}{several}"


# Settings ---------------------------------------------------------------------------------------------------------


def settings() -> Iterator[str]:
    for setting, default in every_setting():
        yield f"{setting} = {default!r}, {variable(setting)}"
    for name, kind in typing.get_type_hints(_settings_class()).items():
        for entry in _dataclasses_in(kind):
            if entry is not kind:
                yield from (f"{name}.*.{one.name} = {_default(one)!r}" for one in dataclasses.fields(entry))


def every_setting() -> Iterator[tuple[str, Any]]:
    for table in dataclasses.fields(_settings_class()):
        if not is_table(table) or table.default_factory is dataclasses.MISSING:
            yield table.name, _default(table)
        else:
            settings = dataclasses.fields(type(table.default_factory()))
            yield from ((f"{table.name}.{one.name}", _default(one)) for one in settings)


def variable(setting: str) -> str:
    return PREFIX + setting.upper().replace(".", "_")


def _settings_class() -> Any:
    return type(load_settings(environment={}))


def _default(setting: Any) -> Any:
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return None if setting.default is dataclasses.MISSING else setting.default


def _dataclasses_in(kind: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(kind):
        yield kind
    for inner in typing.get_args(kind):
        yield from _dataclasses_in(inner)


# Metrics ----------------------------------------------------------------------------------------------------------


def metrics(pages: Iterable[str]) -> Iterator[str]:
    """Names and kinds as the pages show them; a metric without numbers shows no labels, so those are looked up."""
    known = {metric.full_name.removesuffix("_total"): metric for metric in _all_metrics()}
    for line in (line for page in pages for line in page.splitlines() if line.startswith("# TYPE ")):
        _, _, name, kind = line.split()
        yield f"{name} is a {kind} by ({', '.join(known[name.removesuffix('_total')].labels)})"


def _all_metrics() -> Iterator[Metric]:
    modules = [module for name, module in sys.modules.items() if name.startswith("batchwright.")]
    for value in [value for module in modules for value in list(vars(module).values())]:
        yield from (one for one in (value if isinstance(value, tuple | list) else [value]) if isinstance(one, Metric))


# The schema -------------------------------------------------------------------------------------------------------

_TABLES = """
    SELECT class.oid, class.relname, class.relkind::text FROM pg_class class
    WHERE class.relnamespace = 'batchwright'::regnamespace AND class.relkind IN ('r', 'p', 'v', 'm', 'S')
      AND (NOT class.relispartition OR class.relname = 'job_event_default') -- the others are single weeks
"""
_SQL = (
    f"""
    SELECT format('%s %s %s%s%s', class.relname, attname, format_type(atttypid, atttypmod),
                  CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END,
                  CASE WHEN value.adbin IS NULL THEN ''
                       ELSE ' DEFAULT ' || pg_get_expr(value.adbin, value.adrelid) END)
    FROM ({_TABLES}) class
    JOIN pg_attribute attribute ON attribute.attrelid = class.oid AND attribute.attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef value ON value.adrelid = class.oid AND value.adnum = attribute.attnum
    WHERE class.relkind <> 'S'
    """,
    f"SELECT format('%s is a %s', relname, relkind) FROM ({_TABLES}) class",
    f"""
    SELECT format('%s CONSTRAINT %s %s', class.relname, conname, pg_get_constraintdef(limits.oid))
    FROM pg_constraint limits JOIN ({_TABLES}) class ON class.oid = conrelid
    WHERE contype <> 'n' -- NOT NULL is said of its column; versions before 18 do not list it here
    """,
    f"SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN ({_TABLES}) class ON class.oid = indrelid",
    f"""
    SELECT format('%s TRIGGER %s', class.relname, tgname) FROM pg_trigger JOIN ({_TABLES}) class ON class.oid = tgrelid
    WHERE NOT tgisinternal
    """,
    """
    SELECT format('TYPE %s HAS %s', typname, enumlabel) FROM pg_enum JOIN pg_type ON pg_type.oid = enumtypid
    WHERE typnamespace = 'batchwright'::regnamespace
    """,
    """
    SELECT format('FUNCTION %s(%s)', proname, pg_get_function_identity_arguments(oid)) FROM pg_proc
    WHERE pronamespace = 'batchwright'::regnamespace
    """,
    "SELECT format('MIGRATION %s', number) FROM batchwright.migration",
)


async def sql(database_url: str) -> list[str]:
    """Read it with our schema in the search path; otherwise the server writes the schema before every name."""
    async with AsyncBatchwright(database_url=database_url) as client, client.pool.transaction() as session:
        await session.rows("SET LOCAL search_path TO batchwright, public")
        return [line for query in _SQL for (line,) in await session.rows(query)]


# The list ---------------------------------------------------------------------------------------------------------


def differences(promised: Surface, found: Surface) -> list[str]:
    """What is gone and what was added, a line each."""
    return [
        f"{name}: {said} {line}"
        for name in promised | found
        for said, lines in (
            ("gone ", set(promised.get(name, ())) - set(found.get(name, ()))),
            ("added", set(found.get(name, ())) - set(promised.get(name, ()))),
        )
        for line in sorted(lines)
    ]


async def _print() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with EmbeddedPostgres(Path(folder) / "data") as server:
            client = await AsyncBatchwright(database_url=server.url).open(migrated=False)
            await client.migrate()
            await client.close()
            found = await surface(server.url)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    asyncio.run(_print())
