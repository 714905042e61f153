"""OpenAI's format: its messages for invalid requests, and what its objects have in common."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.responses import Response

from batchwright.api.errors import Refusal, unknown
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import Body, Text
from batchwright.errors import NotFound

EXPIRES_SECONDS_MIN = 3_600
EXPIRES_SECONDS_MAX = 2_592_000

Id = Annotated[Text, Path(min_length=1, max_length=100)]
AfterId = Annotated[Text, Field(min_length=1, max_length=100)]


class OpenAIRoute(OrjsonRoute):
    """A route whose errors have the words that OpenAI's clients know."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                problem = error.errors()[0]
                if problem["type"] == "json_invalid":
                    raise
                raise _refusal(problem) from error
            except NotFound as error:
                raise _absent(error) from error

        return answer


class ExpiresAfter(Body):
    """How long a file is kept after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=True, ge=EXPIRES_SECONDS_MIN, le=EXPIRES_SECONDS_MAX)]


def unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def missing(param: str) -> Refusal:
    return Refusal(f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def unsupported(param: str, value: str, supported: Sequence[str], reason: str | None = None) -> Refusal:
    known = ", ".join(f"'{one}'" for one in supported)
    text = f"Invalid value: '{value[:100]}'. Supported values are: {known}."
    return Refusal(f"{text} It is refused because {reason}." if reason else text, code="invalid_value", param=param)


def wrong_type(param: str, expected: str, found: str) -> Refusal:
    return Refusal(
        f"Invalid type for '{param}': expected {expected}, but got {found} instead.", code="invalid_type", param=param
    )


def out_of_range(param: str, value: object, *, least: object = None, most: object = None) -> Refusal:
    word, sign = ("below minimum", ">=") if most is None else ("above maximum", "<=")
    bound = least if most is None else most
    message = f"Invalid '{param}': integer {word} value. Expected a value {sign} {bound}, but got {value} instead."
    return Refusal(message, code=f"integer_{word.replace('imum', '').replace(' ', '_')}_value", param=param)


def unknown_cursor(error: NotFound) -> Refusal:
    """A page after an object that does not exist: clients would take an empty page for the end of the list."""
    return Refusal(_absent(error).detail, code="invalid_value", param="after")


_ABSENT = {
    "batch": ("No batch found with id '{}'.", None),
    "file": ("No such File object: {}", "id"),
    "upload": ("No such Upload object: {}", "id"),
}


def _absent(error: NotFound) -> Refusal:
    """The error for a missing object; OpenAI gives it no code."""
    if error.kind not in _ABSENT:
        return Refusal(str(error), status=404, code="not_found")
    words, param = _ABSENT[error.kind]
    return Refusal(words.format(error.id), status=404, param=param)


_EXPECTED = {
    "bool_parsing": "a boolean",
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_KINDS = {
    bool: "a boolean",
    dict: "an object",
    float: "a decimal number",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}


def _refusal(problem: Mapping[str, Any]) -> Refusal:
    """The framework's validation errors, in OpenAI's words."""
    place, *path = problem["loc"]
    param = ".".join(str(part) for part in path if part != "[key]")[:200] or str(place)
    found, context = problem.get("input"), problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return missing(param)
        case "extra_forbidden":
            return unknown(param)
        case kind if kind in _EXPECTED:
            return wrong_type(param, _EXPECTED[kind], _KINDS.get(type(found), "something else"))
        case "greater_than_equal":
            return out_of_range(param, found, least=context["ge"])
        case "less_than_equal":
            return out_of_range(param, found, most=context["le"])
        case "string_too_long" | "too_long":
            return _too_long(param, found, context)
        case "string_too_short":
            return Refusal(f"Invalid '{param}': empty string.", code="empty_string", param=param)
        case "literal_error" | "enum":
            return unsupported(param, str(found), context["expected"].replace("'", "").split(" or "))
        case "string_pattern_mismatch":
            message = f"Invalid '{param}': a NUL character cannot be stored."
            return Refusal(message, code="invalid_value", param=param)
    return Refusal(f"Invalid '{param}': {problem['msg']}.", code="invalid_value", param=param)


def _too_long(param: str, found: Any, context: Mapping[str, Any]) -> Refusal:
    most = context["max_length"]
    if isinstance(found, dict):
        message = (
            f"Invalid '{param}': too many properties. Expected an object with at most {most} properties, "
            f"but got an object with {len(found)} properties instead."
        )
        return Refusal(message, code="object_above_max_properties", param=param)
    what = "string" if isinstance(found, str) else "array"
    message = (
        f"Invalid '{param}': {what} too long. Expected {'a' if what == 'string' else 'an'} {what} with maximum length "
        f"{most}, but got one with length {len(found)} instead."
    )
    return Refusal(message, code=f"{what}_above_max_length", param=param)
