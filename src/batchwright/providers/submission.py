"""Turns a user's request into a task, or an error that says what is wrong. Nothing is created until all checks pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, get_args
from urllib.parse import unquote, urlsplit

import orjson

from batchwright.db.retry import retry_unavailable
from batchwright.engine.catalog import Catalog
from batchwright.engine.metadata import check_metadata
from batchwright.errors import ConfigurationError, Fatal, InvalidInput, NotFound, OperationError
from batchwright.files.store import Files
from batchwright.providers.buckets import SCHEMES, split_uri
from batchwright.providers.contract import Adapter, Input, Problem, Request, TaskType
from batchwright.providers.directory import Directory
from batchwright.providers.settings import TaskSettings
from batchwright.providers.tasks import NewTask, Target, Task, Tasks

TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)
TIMEOUT_HOURS_MAX = 30 * 24.0
MODELS_MAX = 32
URL_CHARACTERS_MAX = 2_000
_TRIES_MAX = 4
_PROBE = "bw-" + "0" * 26
_REASONS_SHOWN = 5
_FILE = "file-"

Unusable = tuple[str, str]
"""The name of an input that is left out, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedInput:
    """An input as a user names it: a URL, or a stored file."""

    url: str | None = None
    file_id: str | None = None
    filename: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    """Set together with `bytes` for a file that is stored only after the task has passed all checks."""

    @classmethod
    def of(cls, text: str) -> WantedInput:
        """A file by its id, or a URL."""
        return cls(file_id=text) if text.startswith(_FILE) else cls(url=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTask:
    """A task as a user describes it."""

    tenant: str
    task_type: str
    inputs: Sequence[WantedInput]
    provider: str | None = None
    models: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None
    priority: int = 5
    timeout_hours: float | None = None
    result_expires_seconds: int | None = None
    idempotency_key: str | None = None
    traceparent: str | None = None

    @property
    def digest(self) -> bytes:
        """Digest of the request: the same key with another digest is a conflict."""
        said = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("idempotency_key", "traceparent")
        }
        said["inputs"] = [one if one.sha256 is None else replace(one, file_id=None) for one in self.inputs]
        return hashlib.sha256(orjson.dumps(said, default=str, option=orjson.OPT_SORT_KEYS)).digest()


class Submission:
    """Checks requests, and creates tasks from them."""

    def __init__(
        self, tasks: Tasks, catalog: Catalog, files: Files, directory: Directory, settings: TaskSettings
    ) -> None:
        self._tasks = tasks
        self._catalog = catalog
        self._files = files
        self._directory = directory
        self._settings = settings

    async def create(self, wanted: WantedTask, *, must_be_served: bool = False) -> tuple[Task, bool]:
        """Create the task with its job; returns it and whether it is new. InvalidInput means that none was created."""
        from batchwright.providers.operations import task_job  # here, because building its schema takes a while

        # Before the checks, because files that the first request named may be gone by now.
        repeated = await self._tasks.find_repeated(wanted.tenant, wanted.idempotency_key, wanted.digest)
        if repeated is not None:
            return repeated, False
        new = await self._prepare(wanted, is_stored=True)
        (job,) = await self._catalog.prepare([task_job(new, must_be_served=must_be_served)])
        return await retry_unavailable(lambda: self._tasks.create(new, job), tries_max=_TRIES_MAX)

    async def check(self, wanted: WantedTask) -> NewTask:
        """The task as it would be, or InvalidInput. Nothing is created, and files need not be stored yet."""
        return await self._prepare(wanted, is_stored=False)

    async def inspect(self, new: NewTask) -> Sequence[Problem]:
        """What is wrong with the contents of a new task's inputs. This reads the inputs, but calls no provider."""
        for target in new.targets:
            request = Request(
                key=_PROBE,
                task_type=_check_type(new.task_type),
                model=target.model,
                inputs=new.inputs,
                options=new.options,
            )
            try:
                problems = await self._directory.get(target.provider).inspect(request)
            except OperationError as error:
                problems = [Problem(message=str(error))]
            if problems:
                return problems
        return ()

    async def _prepare(self, wanted: WantedTask, *, is_stored: bool) -> NewTask:
        task_type = _check_type(wanted.task_type)
        check_metadata(wanted.metadata or {})
        targets = self._find_targets(wanted, task_type)
        adapters = [self._require(target, task_type) for target in targets]
        targets = [_with_default_model(target, adapter) for target, adapter in zip(targets, adapters, strict=True)]
        _refuse_duplicates(targets)
        inputs, invalid = await self._find_inputs(wanted, task_type, is_stored=is_stored)
        for target, adapter in zip(targets, adapters, strict=True):
            inputs, refused = self._check(wanted, task_type, target, adapter, inputs)
            invalid += refused
        if not inputs:
            reasons = "; ".join(f"{name}: {why}" for name, why in invalid[:_REASONS_SHOWN])
            raise InvalidInput(f"none of the inputs can be used: {reasons}", param="inputs")
        hours = wanted.timeout_hours or max(self._directory.timeout_hours(target.provider) for target in targets)
        if not 0 < hours <= TIMEOUT_HOURS_MAX:
            raise InvalidInput(
                f"timeout_hours is {hours:g}; use above 0 to {TIMEOUT_HOURS_MAX:g}", param="timeout_hours"
            )
        return NewTask(
            tenant=wanted.tenant,
            task_type=task_type,
            provider=wanted.provider,
            targets=targets,
            inputs=inputs,
            invalid_urls=[name for name, _ in invalid],
            options=wanted.options,
            metadata=wanted.metadata,
            priority=wanted.priority,
            timeout_seconds=hours * 3600,
            result_expires_seconds=wanted.result_expires_seconds,
            idempotency_key=wanted.idempotency_key,
            idempotency_digest=wanted.digest if wanted.idempotency_key is not None else None,
            traceparent=wanted.traceparent,
        )

    # Providers --------------------------------------------------------------------------------------------------

    def _find_targets(self, wanted: WantedTask, task_type: TaskType) -> list[Target]:
        """The pairs of provider and model to use."""
        if len(wanted.models) > MODELS_MAX:
            raise InvalidInput(f"a task has at most {MODELS_MAX} models, not {len(wanted.models)}", param="models")
        if wanted.provider is not None:
            return [Target(wanted.provider, model) for model in wanted.models] or [Target(wanted.provider, None)]
        if not wanted.models:
            known = ", ".join(self._directory.can_do(task_type))
            raise InvalidInput(f"set the provider of this task; use one of: {known}", param="provider")
        return [self._split(model) for model in wanted.models]

    def _split(self, model: str) -> Target:
        """`openai/gpt-5-mini` names both."""
        provider, _, name = model.partition("/")
        if not name or not self._directory.is_known(provider):
            raise InvalidInput(
                f"the model {model[:100]!r} has no provider: set `provider`, or write provider/model, such as "
                "openai/gpt-5-mini",
                param="models",
            )
        return Target(provider, name)

    def _require(self, target: Target, task_type: TaskType) -> Adapter:
        """The adapter, if it accepts such tasks and has its credentials."""
        kind = self._directory.kind(target.provider)
        if task_type not in kind.abilities.task_types:
            able = ", ".join(self._directory.can_do(task_type))
            raise InvalidInput(
                f"the provider {target.provider!r} does not support tasks of the type {task_type}; use {able}",
                param="provider",
            )
        if task_type == "completion" and target.model is None:
            raise InvalidInput("a completion needs at least one model", param="models")
        try:
            adapter = self._directory.get(target.provider)
        except ConfigurationError as error:
            raise InvalidInput(f"the provider {target.provider!r} cannot be used: {error}", param="provider") from error
        if self._settings.check_credentials and (missing := adapter.missing_credentials()) is not None:
            raise InvalidInput(f"the provider {target.provider!r} cannot be used: {missing}", param="provider")
        return adapter

    def _check(
        self, wanted: WantedTask, task_type: TaskType, target: Target, adapter: Adapter, inputs: list[Input]
    ) -> tuple[list[Input], list[Unusable]]:
        """The inputs that this provider accepts, and why not the others. A problem of the whole task is an error."""
        most = adapter.abilities.inputs_max or len(inputs) or 1
        problems: list[Problem] = []
        for start in range(0, len(inputs), most):
            request = Request(
                key=_PROBE,
                task_type=task_type,
                model=target.model,
                inputs=inputs[start : start + most],
                options=wanted.options,
            )
            problems += adapter.validate(request)
        bad = {problem.input_id: problem.message for problem in problems if problem.input_id is not None}
        for problem in problems:
            if problem.input_id is None or task_type == "completion":
                raise InvalidInput(f"{target.provider}: {problem.message}", param=problem.param or "inputs")
        refused = [(shown(input), bad[input.id]) for input in inputs if input.id in bad]
        return [input for input in inputs if input.id not in bad], refused

    # Inputs -----------------------------------------------------------------------------------------------------

    async def _find_inputs(
        self, wanted: WantedTask, task_type: TaskType, *, is_stored: bool
    ) -> tuple[list[Input], list[Unusable]]:
        if not wanted.inputs:
            raise InvalidInput("there is no input; give URLs, or ids of stored files", param="inputs")
        most = 1 if task_type == "completion" else self._settings.inputs_max
        if len(wanted.inputs) > most:
            what = "a completion has one input, the file of its requests" if most == 1 else f"the limit is {most}"
            raise InvalidInput(f"there are {len(wanted.inputs)} inputs; {what}", param="inputs")
        inputs, invalid = list[Input](), list[Unusable]()
        for number, one in enumerate(wanted.inputs, 1):
            input = await self._find_input(number, one, wanted.tenant, is_stored=is_stored)
            problem = _why_no_url(one.url) if one.url is not None else _why_no_file(input)
            if problem is not None:
                invalid.append((shown(input)[:URL_CHARACTERS_MAX], problem))
            else:
                inputs.append(input)
        return inputs, invalid

    async def _find_input(self, number: int, one: WantedInput, tenant: str, *, is_stored: bool) -> Input:
        id = f"in-{number}"
        if one.url is not None and one.file_id is not None:
            raise InvalidInput(f"input {number} has both url and file_id; set one of them", param="inputs")
        if one.url is not None:
            return Input(id=id, uri=one.url, filename=one.filename or _name_of(one.url))
        if one.file_id is None:
            raise InvalidInput(f"input {number} has neither url nor file_id; set one of them", param="inputs")
        if one.sha256 is not None and not is_stored:
            return _input_to_be(id, one)
        return await self._stored(id, one, tenant)

    async def _stored(self, id: str, one: WantedInput, tenant: str) -> Input:
        try:
            file = await self._files.get(one.file_id or "", tenant=tenant)
        except NotFound:
            raise InvalidInput(f"there is no file {(one.file_id or '')[:100]!r}", param="inputs") from None
        return Input(id=id, uri=f"file:{file.id}", filename=one.filename or file.filename, bytes=file.bytes)


def _input_to_be(id: str, one: WantedInput) -> Input:
    return Input(id=id, uri=f"file:{one.file_id}", filename=one.filename or "input", bytes=one.bytes)


def shown(input: Input) -> str:
    """The user's name for an input, without the query of a URL, which may hold a secret."""
    return input.uri.removeprefix("file:")


def _with_default_model(target: Target, adapter: Adapter) -> Target:
    """Some providers have a default model."""
    return Target(target.provider, target.model or getattr(adapter.settings, "model", None))


def _refuse_duplicates(targets: Sequence[Target]) -> None:
    """The same model of the same provider twice would be paid for twice."""
    for index, target in enumerate(targets):
        if target in targets[:index]:
            name = f"{target.provider}/{target.model}" if target.model else target.provider
            raise InvalidInput(f"the model {name} is listed twice", param="models")


def _check_type(task_type: str) -> TaskType:
    if task_type not in TASK_TYPES:
        raise InvalidInput(
            f"there is no task type {task_type[:100]!r}; use one of: {', '.join(TASK_TYPES)}", param="task_type"
        )
    return task_type


def _why_no_file(input: Input) -> str | None:
    return f"{input.filename!r} is empty" if input.bytes == 0 else None


def _why_no_url(url: str) -> str | None:
    """Why a URL cannot be read; None if it may be readable."""
    if len(url) > URL_CHARACTERS_MAX:
        return f"it is longer than {URL_CHARACTERS_MAX} characters"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "it contains characters that a URL cannot have"
    scheme = url.partition(":")[0]
    if scheme in SCHEMES:
        try:
            split_uri(url)
        except Fatal:
            return "it does not name an object of a bucket"
        return None
    if scheme != "https":
        return f"it must begin with https://, {', '.join(f'{one}://' for one in sorted(SCHEMES))}, or be a file's id"
    try:
        parts = urlsplit(url)
        is_url = bool(parts.hostname) and "@" not in parts.netloc and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    return None if is_url else "it has no host, or it has a user and password"


def _name_of(url: str) -> str:
    try:
        path = urlsplit(url).path
    except ValueError:
        path = ""
    return PurePosixPath(unquote(path)).name[:200] or "input"
