"""A form built from a JSON Schema: a field for each property, and the payload that the user filled in.

Simple properties get an input of their own type; anything else is entered as JSON. A schema that does not describe an
object becomes a single JSON field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

WHOLE = "payload"
"""The name of the single field if the schema has no properties."""
_PREFIX = "p."
_DEPTH_MAX = 10
_FIELDS_MAX = 100
_OPTIONS_MAX = 500

Kind = Literal["text", "integer", "number", "choice", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One property as a form field."""

    name: str
    """Its name in the form."""
    label: str
    kind: Kind
    is_required: bool
    help: str = ""
    default: str = ""
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of a form: the payload, or the problem of each field."""

    payload: Any
    problems: Mapping[str, str]


def fields_of(schema: Mapping[str, Any]) -> list[Field]:
    """The fields of the form."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or len(properties) > _FIELDS_MAX:
        is_free = schema in ({}, {"type": "object"})
        help = "JSON; empty for none." if is_free else "JSON."
        return [Field(name=WHOLE, label="Payload", kind="json", is_required=False, help=help)]
    required = set(schema.get("required", ()))
    # The database does not keep their order.
    names = sorted(properties, key=lambda name: (name not in required, name))
    return [_field(name, properties[name], schema, name in required) for name in names]


def fill(fields: Sequence[Field], given: Callable[[str], str]) -> Filled:
    """The payload from these texts; empty fields are left out, so that their defaults apply."""
    payload: Any = {}
    problems: dict[str, str] = {}
    for field in fields:
        text = given(field.name)
        if not text:
            if field.is_required and field.kind != "text":
                problems[field.name] = "This field is required."
            elif field.is_required:
                payload[field.label] = ""
            continue
        try:
            value = _value(field, text)
        except ValueError as error:
            problems[field.name] = str(error)
            continue
        if field.name == WHOLE:
            payload = value
        else:
            payload[field.label] = value
    return Filled(payload, problems)


def _field(name: str, about: Any, schema: Mapping[str, Any], is_required: bool) -> Field:
    described = about if isinstance(about, Mapping) else {}
    plain, is_nullable = _resolve(described, schema)
    kind, options = _kind(plain)
    default = described.get("default", plain.get("default"))
    words = [str(described.get("description") or plain.get("description") or "")]
    if kind == "json":
        words.append(f"JSON{_shape_hint(plain)}.")
    if options and (not is_required or is_nullable):
        options = (("", ""), *options)
    return Field(
        name=_PREFIX + name,
        label=name,
        kind=kind,
        is_required=is_required,
        help=" ".join(filter(None, words)),
        default=_shown(default, kind),
        options=options,
    )


def _resolve(about: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Resolves a reference, or a choice between a type and null."""
    is_nullable = False
    for _ in range(_DEPTH_MAX):
        if "$ref" in about:
            about = schema.get("$defs", {}).get(str(about["$ref"]).rpartition("/")[2], {})
            continue
        others = [one for one in about.get("anyOf", ()) if one.get("type") != "null"]
        if len(others) == 1:
            is_nullable |= len(about["anyOf"]) > 1
            about = others[0]
            continue
        break
    return about, is_nullable


def _kind(plain: Mapping[str, Any]) -> tuple[Kind, tuple[tuple[str, str], ...]]:
    if isinstance(choices := plain.get("enum"), list) and len(choices) <= _OPTIONS_MAX:
        return "choice", tuple((orjson.dumps(one).decode(), str(one)) for one in choices)
    match plain.get("type"):
        case "string":
            return "text", ()
        case "integer":
            return "integer", ()
        case "number":
            return "number", ()
        case "boolean":
            return "choice", (("true", "yes"), ("false", "no"))
    return "json", ()


def _value(field: Field, text: str) -> Any:
    match field.kind:
        case "text":
            return text
        case "integer" | "number":
            try:
                return int(text) if field.kind == "integer" else float(text)
            except ValueError:
                raise ValueError(f"{text!r} is not a valid {field.kind}.") from None
        case "choice" | "json":
            try:
                return orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"This is not JSON: {error}.") from None


def _shape_hint(plain: Mapping[str, Any]) -> str:
    kind = plain.get("type")
    return f": a list, such as {_example(plain)}" if kind == "array" else ": an object" if kind == "object" else ""


def _example(plain: Mapping[str, Any]) -> str:
    items = plain.get("items")
    kind = items.get("type") if isinstance(items, Mapping) else None
    return "[1, 2]" if kind in ("integer", "number") else '["a", "b"]'


def _shown(default: Any, kind: Kind) -> str:
    if default is None:
        return ""
    return str(default) if kind in ("text", "integer", "number") else orjson.dumps(default, default=str).decode()
