"""Write the pages that follow from code or figures: lifecycles, settings, the HTTP reference, providers, capacity.

`python docs/generate.py` writes them; with `--check` it only says whether they are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi.routing import APIRoute
from generate_capacity import capacity
from generate_providers import providers

from batchwright.access.settings import ApiSettings
from batchwright.api.access import Needs
from batchwright.api.application import application
from batchwright.app import VERSION
from batchwright.engine.exposition import process_counts
from batchwright.plugins import load, part_kinds
from batchwright.settings import PREFIX, Settings, is_table, settings_class
from batchwright.states import LIFECYCLES, Lifecycle
from batchwright.webhooks.settings import WebhookSettings

DOCS = Path(__file__).parent
ENTRIES = {"webhooks": ("[[webhooks.TENANT]]", WebhookSettings)}


def lifecycles() -> str:
    parts = ["# Lifecycles\n", "Generated from `states.py` by `make docs`. The database refuses every other move.\n"]
    parts += [_lifecycle(lifecycle) for lifecycle in LIFECYCLES]
    return "\n".join(parts)


def _lifecycle(lifecycle: Lifecycle) -> str:
    lines = [f"## {lifecycle.name.capitalize()}\n", "```mermaid", "stateDiagram-v2", f"    [*] --> {lifecycle.initial}"]
    for source, target in dict.fromkeys((move.source, move.target) for move in lifecycle.moves):
        verbs = ", ".join(move.verb for move in lifecycle.moves if (move.source, move.target) == (source, target))
        lines.append(f"    {source} --> {target}: {verbs}")
    lines += [f"    {state} --> [*]" for state in sorted(lifecycle.terminal)]
    lines += ["```\n", "| state | what it means |", "|---|---|"]
    lines += [f"| `{state}` | {meaning} |" for state, meaning in lifecycle.meanings.items()]
    lines += ["", "| verb | from | to | when |", "|---|---|---|---|"]
    lines += [f"| {move.verb} | `{move.source}` | `{move.target}` | {move.why} |" for move in lifecycle.moves]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    lines = [
        "# Configuration\n",
        "Generated from the settings classes by `make docs`.\n",
        f"The file `batchwright.toml`, or the one that `{PREFIX}CONFIG` names, comes first,",
        "then the environment, then flags; the last one wins.\n",
        "```toml",
        'operations = ["shop.jobs"]',
        "",
        "[worker]",
        "concurrency = 50",
        "queue_limits = { gpu = 1 }",
        "```\n",
    ]
    for part in dataclasses.fields(settings_class()):
        if not is_table(part):
            lines += [f"## {part.name}\n", *_table(settings_class(), None, only=part.name), *_entries(part.name)]
        else:
            kind = type(part.default_factory())
            lines += [f"## [{part.name}]\n", f"{inspect.getdoc(kind)}\n", *_table(kind, part.name)]
    return "\n".join(lines)


def _table(kind: type, part: str | None, only: str | None = None) -> list[str]:
    notes = _notes(kind)
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for setting in dataclasses.fields(kind):
        if only in (None, setting.name):
            name = f"{part}.{setting.name}" if part else setting.name
            default = setting.default if setting.default is not dataclasses.MISSING else setting.default_factory()
            shown = "unset" if default is None else repr(default)
            variable = PREFIX + name.upper().replace(".", "_")
            lines.append(f"| `{name}` | `{variable}` | `{shown}` | {notes.get(setting.name, '')} |")
    return [*lines, ""]


def _entries(part: str) -> list[str]:
    """The settings of a part's entries, which have no variables of their own: the environment has the part as JSON."""
    if part not in ENTRIES:
        return []
    heading, kind = ENTRIES[part]
    notes = _notes(kind)
    lines = [f"### {heading}\n", f"{inspect.getdoc(kind)}\n", "| setting | default | meaning |", "|---|---|---|"]
    for setting in dataclasses.fields(kind):
        shown = "unset" if setting.default is None else repr(setting.default)
        lines.append(f"| `{setting.name}` | `{shown}` | {notes.get(setting.name, '')} |")
    return [*lines, ""]


def _notes(kind: type) -> dict[str, str]:
    """The string below each field, which is its documentation; or the one in the annotation of a part's table."""
    if kind is settings_class():
        tables = {setting.name: getattr(setting.type, "__metadata__", ()) for setting in dataclasses.fields(kind)}
        said = {name: note for name, notes in tables.items() for note in notes if isinstance(note, str)}
        return {**_notes(Settings), **said}
    (tree,) = ast.parse(inspect.getsource(kind)).body
    notes = {
        name: note for base in kind.__bases__ if dataclasses.is_dataclass(base) for name, note in _notes(base).items()
    }
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            notes[node.target.id] = " ".join(str(after.value.value).split())
    return notes


def http() -> str:
    app = application(
        SimpleNamespace(
            core=SimpleNamespace(parts=part_kinds()),
            counts=process_counts(),
            served=(),
            settings=ApiSettings(),
            version=VERSION,
        )
    )
    document = app.openapi()
    scopes = {(route.path_format, method): _scope(route) for route in _routes() for method in route.methods}
    lines = [
        "# HTTP reference\n",
        "Generated from the OpenAPI document by `make docs`; a running server gives it at `/openapi.json`.",
        "[Using the HTTP API](http.md) tells how it hangs together.\n",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            section = by_tag.setdefault(route["tags"][0], [])
            section += _route(method.upper(), path, route, scopes)
    for tag, section in by_tag.items():
        lines += [f"## {tag.capitalize()}\n", *section]
    lines += ["## Objects\n", *_objects(document)]
    return "\n".join(lines)


def _routes() -> list[APIRoute]:
    routers = [load(place) for part in part_kinds() for place in part.routers]
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]


def _scope(route: APIRoute) -> str | None:
    return next((below.call.scope for below in route.dependant.dependencies if isinstance(below.call, Needs)), None)


def _route(method: str, path: str, route: dict[str, Any], scopes: dict[str, Any]) -> list[str]:
    needed = scopes[path, method]
    lines = [f"### `{method} {path}`\n", f"{route['summary']}. {_sentence(route.get('description'))}".rstrip() + "\n"]
    lines.append(f"Scope: `{needed}`.\n" if needed else "Needs no key.\n")
    shown = [one for one in route.get("parameters", ()) if one["name"] != "tenant"]
    if shown:
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        for one in shown:
            note = one.get("description") or one["schema"].get("description", "")
            need = "" if one.get("required") else _default(one["schema"])
            lines.append(f"| `{one['name']}` | {one['in']} | {_type(one['schema'])} | {(note + need).strip()} |")
        lines.append("")
    if body := route.get("requestBody"):
        ((kind, content),) = body["content"].items()
        lines += _form(content["schema"]) if kind == "multipart/form-data" else [f"Body: {_type(content['schema'])}.\n"]
    answers = []
    for status, answer in route["responses"].items():
        schema = next(iter(answer.get("content", {"": {}}).values())).get("schema", {})
        if int(status) < 300:
            kind = _type(schema) if schema else "no body"
            answers.append(f"`{status}` {kind}")
    errors = [status for status in route["responses"] if int(status) >= 400]
    lines.append(f"Answers: {', '.join(answers)}; errors: {', '.join(f'`{status}`' for status in errors) or 'none'}.\n")
    return lines


def _form(schema: dict[str, Any]) -> list[str]:
    lines = ["Body: a form (`multipart/form-data`).\n", "| part | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {_type(one)} | {one['description']} |" for name, one in schema["properties"].items()]
    return [*lines, ""]


def _objects(document: dict[str, Any]) -> list[str]:
    lines = []
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name.startswith(("Page_", "All_", "HTTPValidationError", "ValidationError")):
            continue
        lines += [f"### {_word(name)}\n", f"{_sentence(schema.get('description'))}\n"]
        if "enum" in schema:
            lines.append(f"One of {', '.join(f'`{value}`' for value in schema['enum'])}.\n")
            continue
        required = schema.get("required", ())
        lines += ["| field | type | meaning |", "|---|---|---|"]
        for field, one in schema.get("properties", {}).items():
            note = one.get("description", "")
            need = "" if field in required else _default(one)
            lines.append(f"| `{field}` | {_type(one)} | {(note + need).strip()} |")
        lines.append("")
    return lines


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _reference(schema["$ref"].rsplit("/", 1)[-1])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[choice]))
    if "const" in schema:
        return f"`{schema['const']!r}`".replace("'", '"')
    if "enum" in schema:
        return " ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any JSON")
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {_type(schema['additionalProperties'])}"
    return f"{kind}{_bounds(schema)}"


def _reference(name: str) -> str:
    for prefix, words in (("Page_", "page of "), ("All_", "list of ")):
        if name.startswith(prefix):
            return words + _reference(name.removeprefix(prefix).rstrip("_"))
    return f"[{_word(name)}](#{_word(name).lower()})"


def _word(name: str) -> str:
    return name.removesuffix("View") if name.endswith("View") else name


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "≥ {}", "maximum": "≤ {}", "minLength": "at least {} characters",
        "maxLength": "at most {} characters", "minItems": "at least {}", "maxItems": "at most {}", "format": "{}",
    }  # fmt: skip
    found = [text.format(schema[name]) for name, text in words.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value in (None, [], "") else f" Default: `{value}`."


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


PAGES = {
    "capacity.md": capacity,
    "lifecycles.md": lifecycles,
    "configuration.md": configuration,
    "http-reference.md": http,
    "providers.md": lambda: providers(_notes),
}


def main() -> int:
    stale = []
    for name, write in PAGES.items():
        page, text = DOCS / name, write()
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(text, encoding="utf-8")
    for name in stale:
        sys.stdout.write(f"docs/{name} {'is not up to date: run make docs' if '--check' in sys.argv else 'written'}\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
