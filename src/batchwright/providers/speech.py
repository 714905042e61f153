"""What the speech adapters have in common: the options of a transcription, checks of its inputs, and its results."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import orjson

from batchwright.errors import Fatal, OperationError, Transient
from batchwright.inference.http import Response, Service
from batchwright.providers.buckets import split_uri
from batchwright.providers.contract import (
    Abilities,
    Counts,
    Ending,
    Input,
    Phase,
    Problem,
    Request,
    Result,
    Status,
    Usage,
)
from batchwright.providers.service import HttpAdapter
from batchwright.providers.tools import AdapterTools

log = logging.getLogger(__name__)

SCHEMES = frozenset({"https", "gs", "s3", "az", "file"})
RESULT_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size of one transcript: four hours with five alternatives for every word take less."""
AUTO = "auto"
"""The language value that asks the provider to detect the language."""
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*|auto")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARACTERS_MAX = 80
_OPTIONS = frozenset({"language", "languages", "diarization", "speakers_max", "word_timestamps", "provider_options"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """The options of a transcription, the same for all providers."""

    languages: Sequence[str]
    """The possible languages; with more than one, the provider detects the right one."""
    has_diarization: bool = False
    speakers_max: int | None = None
    has_word_timestamps: bool = False
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the provider's own request, which override ours."""

    @classmethod
    def of(cls, request: Request, default_language: str) -> SpeechOptions:
        """The options of a request that has passed `check_options`."""
        options = request.options
        languages = options.get("languages") or [options.get("language") or default_language]
        return cls(
            languages=tuple(languages),
            has_diarization=options.get("diarization", False),
            speakers_max=options.get("speakers_max"),
            has_word_timestamps=options.get("word_timestamps", False),
            provider_options=options.get("provider_options") or {},
        )


def check_options(request: Request, *, speakers: range, languages_max: int, can_detect: bool = True) -> list[Problem]:
    """What is wrong with the options, by name."""
    options = request.options
    problems = [
        Problem(message=f"the option {name!r} is unknown; use one of: {', '.join(sorted(_OPTIONS))}", param=name)
        for name in sorted(set(options) - _OPTIONS)
    ]
    problems += _check_languages(options, languages_max)
    if not can_detect and AUTO in (options.get("language"), *_list(options.get("languages"))):
        message = f"this provider cannot detect the language ({AUTO!r}): list up to {languages_max} in `languages`"
        problems.append(Problem(message=message, param="language"))
    for name in ("diarization", "word_timestamps"):
        if not isinstance(options.get(name, False), bool):
            problems.append(Problem(message=f"{name} must be true or false", param=name))
    count = options.get("speakers_max")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count not in speakers):
        message = f"speakers_max is {count!r}; it must be {speakers.start} to {speakers.stop - 1}"
        problems.append(Problem(message=message, param="speakers_max"))
    if not isinstance(options.get("provider_options") or {}, Mapping):
        problems.append(Problem(message="provider_options must be an object", param="provider_options"))
    return problems


def check_inputs(request: Request, abilities: Abilities) -> list[Problem]:
    """What is wrong with the inputs, as far as that is visible without fetching them."""
    if request.task_type not in abilities.task_types:
        return [Problem(message=f"a task of type {request.task_type} is not for this provider", param="task_type")]
    if not request.inputs:
        return [Problem(message="there is no input", param="inputs")]
    most = abilities.inputs_max
    if most is not None and len(request.inputs) > most:
        return [
            Problem(
                message=f"{len(request.inputs)} inputs are too many for one job; the limit is {most}", param="inputs"
            )
        ]
    found = [(input.id, _why_not(input, abilities)) for input in request.inputs]
    return [Problem(message=message, input_id=id) for id, message in found if message is not None]


def staged_name(index: int, input: Input) -> str:
    """A name for the copy of an input: unique within its job, plain, and with its own suffix."""
    name = _UNSAFE.sub("_", PurePosixPath(input.filename).name).strip(".")[-_NAME_CHARACTERS_MAX:]
    return f"{index:04}-{name or 'audio'}"


def transcribed(input_id: str, text: str, raw: Mapping[str, Any], seconds: float | None = None) -> Result:
    """A result: its text, and everything else that the provider returned."""
    return Result(key=input_id, value={"text": text, "raw": raw}, usage=Usage(audio_seconds=seconds))


def failed(input_id: str, error: Mapping[str, Any]) -> Result:
    """A failed result: kind, code and message say why."""
    return Result(key=input_id, error=error)


def refused(error: OperationError) -> dict[str, Any]:
    """Why an input was left out of its job, as it is stored. An error that is not about this input alone is raised."""
    if not isinstance(error, Fatal) or error.scope != "item":
        raise error
    return {"kind": error.kind, "code": error.code, "message": str(error)}


MISSING = {"kind": "transient", "code": "missing_result", "message": "the provider returned no result for this input"}


class ObjectAdapter(HttpAdapter):
    """A provider whose answers are all JSON objects."""

    def checked(self, response: Response) -> dict[str, Any]:
        document = super().checked(response)
        if not isinstance(document, dict):
            raise Transient(f"the answer with status {response.status} is not a JSON object", code="not_json")
        return document


async def each_once(request: Request, status: Status, found: AsyncIterator[Result]) -> AsyncIterator[Result]:
    """One result for each input: the first one, or why there is none. Results for unknown inputs are left out."""
    left = {input.id for input in request.inputs}
    async for result in found:
        if result.key in left:
            left.discard(result.key)
            yield result
        else:
            log.warning("%s: there is a second or an unknown result for %r", request.key, result.key)
    for input in request.inputs:
        if input.id in left:
            yield failed(input.id, status.error or MISSING)


def lost(external_id: str) -> Status:
    """The status of a job that the provider says it does not have. The provider may be wrong."""
    error = {"kind": "fatal", "code": "job_not_found", "message": f"the provider has no job {external_id}"}
    return Status(phase=Phase.RUNNING, raw_status="NOT_FOUND", is_error=True, error=error)


def ending_of(counts: Counts, otherwise: Ending) -> Ending:
    """How a job ended, judged by its counts; by the provider's status only if there are no counts."""
    if counts.total is None or counts.succeeded is None:
        return otherwise
    if counts.succeeded == 0:
        return otherwise if otherwise in (Ending.CANCELLED, Ending.EXPIRED) else Ending.FAILED
    is_whole = counts.succeeded >= counts.total and otherwise is not Ending.FAILED
    return Ending.SUCCEEDED if is_whole else Ending.PARTIAL


async def fetch_signed(service: Service, url: str) -> Response:
    """Fetch a signed URL without credentials, whatever the response status."""
    async with service.open_signed(url) as incoming:
        return await incoming.whole(RESULT_BYTES_MAX)


async def fetch_object(tools: AdapterTools, uri: str) -> bytes:
    """The complete object of a bucket; empty if there is none."""
    root, key = split_uri(uri)
    content = bytearray()
    try:
        async for chunk in tools.bucket(root).read(key):
            content += chunk
            if len(content) > RESULT_BYTES_MAX:
                raise Transient(f"{uri} is longer than {RESULT_BYTES_MAX} bytes", code="result_too_large")
    except Fatal as error:
        if error.scope != "item":
            raise
    return bytes(content)


def read_object(body: bytes) -> dict[str, Any] | None:
    """The bytes as a JSON object; None if they are not one."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects; if both have a value that is not an object, theirs wins."""
    both = dict(ours)
    for name, value in theirs.items():
        known = both.get(name)
        is_nested = isinstance(known, Mapping) and isinstance(value, Mapping)
        both[name] = merged(known, value) if is_nested and known is not None else value
    return both


def seconds_of(text: Any) -> float | None:
    """A duration as Google writes it, such as `12.5s`."""
    try:
        return float(str(text).removesuffix("s"))
    except ValueError:
        return None


def _check_languages(options: Mapping[str, Any], languages_max: int) -> list[Problem]:
    one, several = options.get("language"), options.get("languages")
    if one is not None and several is not None:
        return [Problem(message="set either language or languages, not both", param="languages")]
    if several is not None and (not isinstance(several, list) or not 1 <= len(several) <= languages_max):
        return [Problem(message=f"languages must be a list of 1 to {languages_max}", param="languages")]
    return [
        Problem(
            message=f"{language!r} is not a language code such as en-US",
            param="language" if several is None else "languages",
        )
        for language in several or [one]
        if language is not None and not (isinstance(language, str) and _LANGUAGE.fullmatch(language))
    ]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _why_not(input: Input, abilities: Abilities) -> str | None:
    scheme = input.uri.partition(":")[0]
    if scheme not in SCHEMES:
        return f"{input.filename!r} has an address that begins with {scheme[:20]!r}; use {', '.join(sorted(SCHEMES))}"
    if not _is_address(scheme, input.uri):
        return f"{input.filename!r} has an incomplete address: {input.uri.partition('?')[0][:200]!r}"
    most = abilities.input_bytes_max
    if most is not None and input.bytes is not None and input.bytes > most:
        return f"{input.filename!r} has {input.bytes} bytes; the provider accepts {most}"
    return None


def _is_address(scheme: str, uri: str) -> bool:
    try:
        if scheme == "https":
            parts = urlsplit(uri)
            return bool(parts.hostname) and "@" not in parts.netloc
        if scheme != "file":
            split_uri(uri)
    except (Fatal, ValueError):
        return False
    return True
