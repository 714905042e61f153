"""`batchwright task submit`: creates a task from URLs, stored files and local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

import orjson
import typer

from batchwright.app import VERSION
from batchwright.cli.flags import (
    Config,
    DatabaseUrl,
    DryRun,
    Json,
    check_length,
    on_part,
    parse_pairs,
    parse_time_span,
    warn_if_no_worker,
)
from batchwright.cli.show import number, print_json, seconds
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import InvalidInput
from batchwright.files.local import hash_file, require_readable, store_file
from batchwright.files.part import FilesPart
from batchwright.files.store import new_file_id
from batchwright.providers.commands.show import exit_code, inputs_text, targets_text
from batchwright.providers.commands.watch import watch
from batchwright.providers.part import ProvidersPart
from batchwright.providers.submission import TIMEOUT_HOURS_MAX, WantedInput, WantedTask
from batchwright.providers.tasks import NewTask, Task
from batchwright.telemetry import tracing

_TENANT_CHARACTERS_MAX = 100
_KEY_CHARACTERS_MAX = 255
_FILE_BYTES_MAX = 5 * 1024**3
_PROBLEMS_SHOWN = 5
_PURPOSE = "user_data"
_STORED = "file-"
_COMPLETION, _TRANSCRIPTION = "completion", "transcription"


def submit(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="URL (https, gs, s3, az), id of a stored file, or path of a local file, which is uploaded first.",
            show_default=False,
        ),
    ],
    task_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="transcription|completion",
            help="Type of task; by default completion for .jsonl, otherwise transcription.",
            show_default=False,
        ),
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="Provider to use; see: batchwright providers.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model to run on all inputs; may be repeated. Without --provider, write provider/model.",
            show_default=False,
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option(metavar="CODE", help="Language of the audio, such as en-US.", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of the task, such as diarization=true or speakers_max=2; may be repeated. Values may be JSON.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Time after which unfinished work is cancelled, up to 30d; by default the provider's.",
            show_default=False,
        ),
    ] = None,
    timeout_hours: Annotated[float | None, typer.Option(hidden=True)] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Your own metadata; may be repeated.", show_default=False),
    ] = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="From 0 (first) to 9 (last).")] = 5,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of the task.")] = DEFAULT_TENANT,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated submit with the same key returns the same task.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "--watch", help="Show the task until it ends.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Send work to outside providers and print the task's id.

    A worker sends each job once, polls it, and merges the results. With --dry-run the task is only checked:
    nothing is stored, created or sent. With --wait the exit code is that of
    batchwright task watch. Examples:

    batchwright task submit call.wav --provider sarvam --language en-IN

    batchwright task submit requests.jsonl --model openai/gpt-5-mini --model anthropic/claude-haiku-4-5
    """
    check_length("--tenant", tenant, _TENANT_CHARACTERS_MAX)
    check_length("--idempotency-key", idempotency_key, _KEY_CHARACTERS_MAX)
    values: dict[str, Any] = {
        "tenant": tenant,
        "provider": provider,
        "models": model or (),
        "options": _read_options(option or (), language),
        "metadata": parse_pairs("--metadata", metadata or (), "project=interviews") or None,
        "priority": priority,
        "timeout_hours": _read_timeout(timeout, timeout_hours),
        "idempotency_key": None if idempotency_key is None else f"tasks:{idempotency_key}",
    }
    found = [_find(text) for text in inputs]

    async def go(part: ProvidersPart) -> int:
        kind = task_type or await _guess_type(part, found[0], tenant)
        wanted = WantedTask(task_type=kind, inputs=[one.wanted for one in found], **values)
        names = {one.wanted.file_id or "": str(one.path) for one in found if one.path is not None}
        new = await _check(part, wanted, names)
        left_out = [names.get(url, url) for url in new.invalid_urls]
        await _inspect(part, new, found, dry_run)
        if dry_run:
            _print_check(new, left_out, json)
            return 0
        task = await part.tasks.find_repeated(new.tenant, new.idempotency_key, new.idempotency_digest) or await _create(
            part, wanted, found
        )
        return await _report(part, task, left_out, wait, json)

    on_part(ProvidersPart, go, lambda code: code, database_url, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An input as the user wrote it on the command line."""

    wanted: WantedInput
    path: Path | None = None
    """Set only for a local file."""

    @property
    def name(self) -> str:
        return self.wanted.filename or urlsplit(self.wanted.url or "").path


def _find(text: str) -> Given:
    """A URL, a local file, or the id of a stored file. Anything else is an error before anything is created."""
    if "://" in text:
        return Given(wanted=WantedInput.of(text))
    path = Path(text)
    if text.startswith(_STORED) and not path.exists():
        return Given(wanted=WantedInput.of(text))
    if not path.exists():
        raise InvalidInput(f"there is no file {text!r} here, and it is neither a URL nor the id of a stored file")
    size = require_readable(path).stat().st_size
    if size > _FILE_BYTES_MAX:
        raise InvalidInput(
            f"{path} has {size} bytes; the limit is {_FILE_BYTES_MAX}: store it in a bucket and give its URL"
        )
    return Given(
        wanted=WantedInput(file_id=new_file_id(), filename=path.name, bytes=size, sha256=hash_file(path)), path=path
    )


async def _check(part: ProvidersPart, wanted: WantedTask, names: Mapping[str, str]) -> NewTask:
    """The task to create. Users do not know the ids of files that are not stored yet, so errors name their paths."""
    try:
        return await part.submission.check(wanted)
    except InvalidInput as error:
        message = str(error)
        for id, name in names.items():
            message = message.replace(id, name)
        raise InvalidInput(message, param=error.param) from error


async def _inspect(part: ProvidersPart, new: NewTask, found: Sequence[Given], is_wanted: bool) -> None:
    """Read local files before they are stored. Read other inputs only on request: the worker reads them anyway."""
    part.unstored.update({one.wanted.file_id or "": one.path for one in found if one.path is not None})
    problems = await part.submission.inspect(new) if is_wanted or part.unstored else ()
    part.unstored.clear()
    if problems:
        more = f"; and {number(len(problems) - _PROBLEMS_SHOWN)} more" if len(problems) > _PROBLEMS_SHOWN else ""
        raise InvalidInput("; ".join(problem.message for problem in problems[:_PROBLEMS_SHOWN]) + more)


async def _guess_type(part: ProvidersPart, first: Given, tenant: str) -> str:
    name = first.name
    if first.path is None and first.wanted.file_id is not None:
        files = part.core.part(FilesPart).files
        name = (await files.get(first.wanted.file_id, tenant=tenant)).filename
    return _COMPLETION if PurePosixPath(name).suffix.lower() == ".jsonl" else _TRANSCRIPTION


async def _create(part: ProvidersPart, wanted: WantedTask, found: list[Given]) -> Task:
    """Store the local files, then create the task."""
    for one in found:
        if one.path is not None:
            await store_file(
                part.core.part(FilesPart).files,
                one.path,
                id=one.wanted.file_id,
                tenant=wanted.tenant,
                purpose=_PURPOSE,
                bytes_max=_FILE_BYTES_MAX,
                sha256=one.wanted.sha256,
            )
    tracing.start(version=VERSION)
    with tracing.span("create-task") as creating:
        task, _ = await part.submission.create(replace(wanted, traceparent=creating.traceparent))
    part.core.doorbell.ring([task.queue])
    return task


async def _report(part: ProvidersPart, task: Task, left_out: Sequence[str], wait: bool, json: bool) -> int:
    """Print the id immediately, so that the user still has it if the wait is interrupted."""
    if not json:
        typer.echo(task.id)
        for name in left_out:
            typer.echo(f"left out, because it cannot be used: {name}", err=True)
        if not task.has_ended:
            await warn_if_no_worker(part.core, task.job_id, "tasks")
    elif not wait:
        print_json({"id": task.id, "status": task.status, "invalid_urls": left_out})
    return exit_code(await watch(part, task.id, json=json)) if wait else 0


def _print_check(new: NewTask, left_out: Sequence[str], json: bool) -> None:
    if json:
        targets = [target._asdict() for target in new.targets]
        kept = {"task_type": new.task_type, "targets": targets, "inputs": [one.filename for one in new.inputs]}
        print_json({"dry_run": True, **kept, "invalid_urls": left_out, "timeout_seconds": new.timeout_seconds})
        return
    typer.echo(f"would create a {new.task_type} for {targets_text(new.targets)}")
    typer.echo(f"  inputs    {inputs_text(new.inputs)}")
    for name in left_out:
        typer.echo(f"  left out  {name}")
    typer.echo(f"  gives up  after {seconds(new.timeout_seconds)}")


def _read_options(texts: Sequence[str], language: str | None) -> dict[str, Any]:
    options = {name: _read_value(value) for name, value in parse_pairs("--option", texts, "diarization=true").items()}
    if language is not None:
        options["language"] = language
    return options


def _read_value(text: str) -> Any:
    """The value as JSON if it parses, otherwise the text itself."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _read_timeout(text: str | None, hours: float | None) -> float | None:
    """In hours. `--timeout-hours` is the former name of `--timeout`."""
    if text is not None:
        seconds = parse_time_span("--timeout", text, least="1s", most=f"{TIMEOUT_HOURS_MAX / 24:g}d")
        return None if seconds is None else seconds / 3600
    if hours is not None and not 0 < hours <= TIMEOUT_HOURS_MAX:
        raise InvalidInput(f"--timeout-hours {hours:g} is out of range: use above 0 to {TIMEOUT_HOURS_MAX:g}")
    return hours
