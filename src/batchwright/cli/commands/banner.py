"""What `batchwright up` and `batchwright api` print at start: addresses, workers, and commands to try next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from batchwright.access.settings import ApiSettings
from batchwright.app import VERSION, AsyncBatchwright
from batchwright.cli.commands.workers import example_command
from batchwright.cli.show import console
from batchwright.db.check import describe
from batchwright.engine.views import OperationView
from batchwright.engine.work import is_own, name_of_work


def banner_lines(
    batchwright: AsyncBatchwright,
    operations: Sequence[OperationView],
    *,
    url: str | None,
    has_key: bool,
    processes: int,
) -> Iterator[tuple[str, str]]:
    yield "database", _database_text(batchwright)
    if url is not None:
        settings = batchwright.settings.api
        if settings.socket is None:
            yield "dashboard", f"{url}/ui"
        yield "http", f"{url} · {_access_text(has_key, settings)}"
        if settings.socket is not None:
            yield "try", f"curl --unix-socket {shlex.quote(str(settings.socket))} http://localhost/v1/jobs"
    if processes:
        own = [operation.name for operation in operations if is_own(operation.name)]
        yield "operations", ", ".join(own) or "none: name a module, a file or a folder, as in batchwright up hello.py"
        yield "runs", _work_text(operations)
        yield "workers", _workers_text(batchwright, processes)
        yield "submit", _submit_hint(batchwright, operations)
    else:
        yield "workers", "none here, because of --no-worker, worker.run_background_poller = false, or batchwright api"
    yield "stop", "Ctrl-C lets running jobs end; press it again to quit now"


def print_banner(lines: Iterator[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(f"  {name}", "cyan"), Text(text))
    out = console()
    out.print(Text(f"Batchwright {VERSION}", "bold"))
    out.print(grid)


def _database_text(batchwright: AsyncBatchwright) -> str:
    if batchwright.embedded is not None:
        return f"embedded PostgreSQL {batchwright.embedded.major} in {batchwright.embedded.root}"
    return describe(batchwright.pool.url)


def _access_text(has_key: bool, settings: ApiSettings) -> str:
    if has_key:
        return "with an API key: batchwright key list"
    if settings.socket is not None:
        return "only your user can connect"
    return (
        "without a key: open to every user of this machine; create a key (batchwright key create NAME), or use "
        "--socket FILE instead of a port"
    )


def _work_text(operations: Sequence[OperationView]) -> str:
    """What the workers run besides operations, and what is missing for batches."""
    work = list(dict.fromkeys(work for one in operations if (work := name_of_work(one.name)) is not None))
    needs = "" if "batches" in work else " · no batches: they need a model server, --url http://127.0.0.1:8000"
    return f"{', '.join(sorted(work))}{needs}"


def _submit_hint(batchwright: AsyncBatchwright, operations: Sequence[OperationView]) -> str:
    """A command for an operation of the user, if there is one: jobs of batches and tasks are not submitted by hand."""
    own = [operation for operation in operations if is_own(operation.name)]
    if own:
        return example_command(own[0])
    if batchwright.settings.has_gateways:
        return "batchwright batch submit FILE --wait"
    if batchwright.settings.table("providers", dict):
        return "batchwright task submit INPUT --provider NAME --wait"
    return "batchwright job submit TYPE --payload '{…}' --watch"


def _workers_text(batchwright: AsyncBatchwright, processes: int) -> str:
    settings = batchwright.settings.worker
    queues = ", ".join(settings.queues) if settings.queues else "all queues"
    how_many = "1 process" if processes == 1 else f"{processes} processes"
    return f"{how_many} · {settings.concurrency} jobs at a time each · {queues}"
