"""`@operation`: a function with a typed payload becomes something that runs as a durable job.

    @operation("embed_page", max_attempts=5, timeout_seconds=60)
    async def embed_page(ctx: Context, page: int, model: str = "small") -> dict[str, int]:
        ...

The payload is the function's parameters without `ctx`; a single parameter that is a pydantic model, a dataclass or
a TypedDict is the whole payload.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import pydantic
import typing_extensions
from pydantic import ConfigDict, TypeAdapter

from batchwright.engine.catalog import MARK
from batchwright.engine.jobs import DEFAULT_QUEUE, MAX_ATTEMPTS, PRIORITY, OnHeld
from batchwright.engine.operation import Kind, Operation
from batchwright.errors import ConfigurationError, PayloadInvalid

F = TypeVar("F", bound=Callable[..., Any])


def operation(
    name: str,
    *,
    queue: str = DEFAULT_QUEUE,
    priority: int = PRIORITY,
    max_attempts: int = MAX_ATTEMPTS,
    timeout_seconds: float | None = None,
    retry_on: tuple[type[BaseException], ...] = (),
    backoff_seconds: float = 2.0,
    backoff_seconds_max: float = 600.0,
    exclusive_key: Sequence[str] = (),
    on_held: OnHeld | Literal["queue", "reject", "coalesce", "supersede"] = OnHeld.QUEUE,
    cpu: bool = False,
) -> Callable[[F], F]:
    """Mark a function as the operation of this name; it stays an ordinary function that can be called.

    `async def` runs on the event loop, `def` in a thread, and `cpu=True` in a separate process. `retry_on` names
    exceptions that are retried. `exclusive_key` names payload fields: only one job with the same values runs at a
    time. `on_held` says what an enqueue does when the key is held.
    """

    def mark(function: F) -> F:
        kind: Kind = "process" if cpu else "async" if inspect.iscoroutinefunction(function) else "thread"
        if cpu and inspect.iscoroutinefunction(function):
            raise ConfigurationError(f"operation {name!r}: cpu=True is for plain functions, not for async def")
        shape = _Shape(name, function)
        unknown = [field for field in exclusive_key if field not in shape.fields]
        if unknown:
            raise ConfigurationError(
                f"operation {name!r}: exclusive_key names {unknown[0]!r}, which is not in the payload"
            )
        made = Operation(
            name=name,
            function=function,
            kind=kind,
            takes_context=shape.takes_context,
            encode=shape.encode,
            arguments=shape.arguments,
            payload_schema=shape.schema(),
            description=inspect.getdoc(function),
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout_seconds=timeout_seconds,
            retry_on=retry_on,
            backoff_seconds=backoff_seconds,
            backoff_seconds_max=backoff_seconds_max,
            exclusive_key=tuple(exclusive_key),
            on_held=OnHeld(on_held),
        )
        setattr(function, MARK, made)
        return function

    _check_name(name)
    return mark


class _Shape:
    """The payload of a function, as pydantic sees it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        parameters = dict(inspect.signature(function).parameters)
        self.takes_context = parameters.pop("ctx", None) is not None
        hints = _hints(name, function)
        for parameter in parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigurationError(
                    f"operation {name!r}: {parameter} cannot be a payload field; use a named parameter"
                )
            if parameter.name not in hints:
                raise ConfigurationError(f"operation {name!r}: the parameter {parameter.name!r} needs a type")
        self.single = self._single(parameters, hints)
        try:
            whole = _model(name, parameters, hints) if self.single is None else hints[self.single]
            self.adapter: TypeAdapter[Any] = TypeAdapter(whole)
            self.fields = set(parameters) if self.single is None else set(self.schema().get("properties", ()))
        except pydantic.errors.PydanticUserError as error:
            raise ConfigurationError(f"operation {name!r}: its payload cannot be JSON: {error.message}") from error

    @staticmethod
    def _single(parameters: dict[str, inspect.Parameter], hints: dict[str, Any]) -> str | None:
        if len(parameters) != 1:
            return None
        (only,) = parameters
        hint = hints[only]
        if not isinstance(hint, type):
            return None
        is_whole = (
            issubclass(hint, pydantic.BaseModel)
            or dataclasses.is_dataclass(hint)
            or typing_extensions.is_typeddict(hint)
        )
        return only if is_whole else None

    def schema(self) -> dict[str, Any]:
        return self.adapter.json_schema()

    def encode(self, payload: Any) -> Any:
        return self.adapter.dump_python(self._validate(payload), mode="json")

    def arguments(self, payload: Any) -> dict[str, Any]:
        value = self._validate(payload)
        if self.single is not None:
            return {self.single: value}
        fields: dict[str, Any] = value.__dict__  # a model created for this payload, so it holds nothing else
        return fields

    def _validate(self, payload: Any) -> Any:
        try:
            # Not the adapter's own method: it takes longer than the validation of a small payload.
            return self.adapter.validator.validate_python({} if payload is None else payload)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            if not first["loc"] and first["type"] == "model_type":
                kind = type(payload).__name__
                raise PayloadInvalid(
                    f"{self.name}: the payload is a {kind}; write a dict with a key for each field", param="payload"
                ) from error
            where = ".".join(map(str, first["loc"])) or "the payload"
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            raise PayloadInvalid(f"{self.name}: {where}: {first['msg']}{more}", param="payload") from error


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(f"operation {name!r}: a type of its parameters cannot be found: {error}") from error


def _model(name: str, parameters: dict[str, inspect.Parameter], hints: dict[str, Any]) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {
        parameter.name: (
            hints[parameter.name],
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters.values()
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False, protected_namespaces=())
    return pydantic.create_model(name, __config__=config, **fields)


def _check_name(name: str) -> None:
    if not name or len(name) > 100 or not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise ConfigurationError(
            f"{name!r} is not an operation name: use words of letters, digits, '_' and '-', joined by dots, "
            "at most 100 characters in all"
        )
