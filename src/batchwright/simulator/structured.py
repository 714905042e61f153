"""JSON on demand: a value that fits a JSON schema, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchwright.errors import InvalidInput

_DEPTH = 4
"""Below this depth only required values are written, so that a recursive schema ends."""
_DEPTH_MAX = 32
_ITEMS_MAX = 10_000
_VALUES_MAX = 20_000
_WORDS = (
    "all",
    "and",
    "any",
    "ask",
    "big",
    "but",
    "can",
    "cat",
    "day",
    "dog",
    "eat",
    "end",
    "few",
    "fly",
    "for",
    "fox",
)
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "duration": "P1DT12H",
    "email": "ada@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "12:00:00Z",
    "uri": "https://example.com/",
    "uuid": "01234567-89ab-4def-8123-456789abcdef",
}
_REFUSED = ("contains", "dependentRequired", "dependentSchemas", "else", "if", "not", "pattern", "patternProperties",
            "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_NO_NAMES: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Form:
    """The requested form of an answer; without a schema it is any object."""

    schema: Mapping[str, Any] | bool | None


def form_of(format: Any, param: str) -> Form | None:
    """What `response_format` asks for, in chat's shape or in that of responses; None means plain text."""
    if format is None:
        return None
    kind = format.get("type") if isinstance(format, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Form(None)
        case "json_schema":
            return Form(_schema_of(format.get("json_schema", format), param))
    values = "'text', 'json_object' and 'json_schema'"
    raise InvalidInput(f"Invalid value: {kind!r}. Supported values are: {values}.", param=f"{param}.type")


def _schema_of(named: Any, param: str) -> Any:
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise InvalidInput(
            f"Missing required parameter: '{param}.json_schema.name'.", param=f"{param}.json_schema.name"
        )
    schema = named.get("schema")
    if not isinstance(schema, dict):
        where = f"{param}.json_schema.schema"
        raise InvalidInput(f"Missing required parameter: '{where}'.", param=where)
    example(schema, 0, param=where_of(named["name"]))  # refuse it now, rather than after the model has worked
    return schema


def where_of(name: str) -> str:
    return f"Invalid schema for response_format '{name}'"


def written(form: Form, seed: int, words: str) -> bytes:
    """An answer in this form. `words` are for an object that may be anything."""
    if form.schema is None:
        return orjson.dumps({"answer": words})
    return orjson.dumps(example(form.schema, seed))


def example(schema: Any, seed: int, *, param: str = "the schema") -> Any:
    """A value that fits the schema. Unsupported schemas are refused, as OpenAI does."""
    try:
        return _Writer(schema, random.Random(seed), param).value(schema, 0)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInput(f"{param}: this is not a JSON schema: {error}", param="response_format") from error


class _Writer:
    def __init__(self, root: Any, dice: random.Random, param: str) -> None:
        self._root = root
        self._dice = dice
        self._param = param
        self._values = 0

    def value(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if self._values > _VALUES_MAX:
            raise self._refusal(f"an answer would have more than {_VALUES_MAX} values")
        if schema is True or schema == {}:
            return self._dice.choice(_WORDS)
        if not isinstance(schema, dict):
            raise self._refusal(f"no value fits {schema!r}")
        if depth > _DEPTH_MAX:
            raise self._refusal("it contains itself endlessly")
        if refused := sorted(set(_REFUSED) & schema.keys()):
            raise self._refusal(f"'{refused[0]}' is not permitted")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._dice.choice(schema["enum"])
        if "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            return self.value(_merged(self._found(schema["$ref"]), rest), depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._one_of(schema, name, depth)
        if "allOf" in schema:
            whole = {name: value for name, value in schema.items() if name != "allOf"}
            for part in schema["allOf"]:
                whole = _merged(whole, self._found(part["$ref"]) if "$ref" in part else part)
            return self.value(whole, depth + 1)
        return self._typed(schema, self._type(schema, depth), depth)

    def _one_of(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        """A value that fits any of them; at great depth, the simplest one."""
        rest = {key: value for key, value in schema.items() if key != name}
        ways = (
            sorted(schema[name], key=_weight) if depth >= _DEPTH else self._dice.sample(schema[name], len(schema[name]))
        )
        return self.value(_merged(rest, ways[0]), depth + 1)

    def _type(self, schema: Mapping[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return "null" if depth >= _DEPTH and "null" in kind else self._dice.choice(kind)
        if kind is None:
            shapes = (("properties", "object"), ("items", "array"), ("prefixItems", "array"), ("minimum", "number"))
            return next((name for key, name in shapes if key in schema), "string")
        return str(kind)

    def _typed(self, schema: Mapping[str, Any], kind: str, depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, is_whole=kind == "integer")
            case "boolean":
                return self._dice.random() < 0.5
            case "null":
                return None
        raise self._refusal(f"there is no type {kind!r}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties: Mapping[str, Any] = schema.get("properties", _NO_NAMES)
        required = schema.get("required", [])
        names = [name for name in properties if name in required or depth < _DEPTH]
        names += [name for name in required if name not in properties]
        other = schema.get("additionalProperties", True)
        found = {name: self.value(properties.get(name, other), depth + 1) for name in names}
        for n in range(schema.get("minProperties", 0) - len(found)):
            found[f"more_{n}"] = self.value(other, depth + 1)
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        least = max(schema.get("minItems", 0), len(first) if depth < _DEPTH else 0)
        most = min(schema.get("maxItems", max(least, 0 if depth >= _DEPTH else 3)), _ITEMS_MAX)
        items, is_distinct = schema.get("items", True), schema.get("uniqueItems", False)
        wanted = max(least, min(most, max(1, least) + self._dice.randrange(3) if depth < _DEPTH else least))
        if items is False:
            wanted = min(wanted, len(first))
        found: list[Any] = []
        tries = 0
        while len(found) < wanted and tries < 20 * wanted:
            tries += 1
            one = self.value(first[len(found)] if len(found) < len(first) else items, depth + 1)
            if not (is_distinct and one in found):
                found.append(one)
        if len(found) < least:
            raise self._refusal(f"{least} different items cannot be found")
        return found

    def _string(self, schema: Mapping[str, Any]) -> str:
        if (format := schema.get("format")) in _FORMATS:
            return _FORMATS[format]
        text = " ".join(self._dice.choice(_WORDS) for _ in range(self._dice.randrange(1, 5)))
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        while len(text) < least:
            text += " " + self._dice.choice(_WORDS)
        if most is not None and len(text) > most:
            text = text[:most]
        return text

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> float | int:
        step = schema.get("multipleOf") or (1 if is_whole else 0.5)
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        if low == -math.inf:
            low = 0 if high >= 0 else high - 100 * step
        first = math.ceil(low / step)
        first += first * step <= schema.get("exclusiveMinimum", -math.inf)
        last = first + 100 if high == math.inf else math.floor(high / step)
        last -= last * step >= schema.get("exclusiveMaximum", math.inf)
        if first > last:
            if not is_whole and "multipleOf" not in schema and low < high:
                return float(low + (high - low) / 2)
            raise self._refusal(f"no number fits {dict(schema)}")
        number: float | int = self._dice.randint(first, last) * step
        return number

    def _found(self, ref: Any) -> Any:
        found = self._root
        for part in str(ref).removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not str(ref).startswith("#") or found is None:
            raise self._refusal(f"{ref!r} cannot be found")
        return found

    def _refusal(self, why: str) -> InvalidInput:
        return InvalidInput(f"{self._param}: {why}", param="response_format")


def _merged(one: Any, other: Any) -> Any:
    """Merge two schemas in simple cases: properties and required names add up, otherwise the second wins."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other if one is True or one == {} else one
    both = {**one, **other}
    for name in ("properties", "$defs"):
        if name in one and name in other:
            both[name] = {**one[name], **other[name]}
    if "required" in one and "required" in other:
        both["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return both


def _weight(schema: Any) -> int:
    return len(orjson.dumps(schema)) + 10_000 * (isinstance(schema, dict) and "$ref" in schema)
