"""What `batchwright up` and `batchwright api` say when they run: where, what, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.cli.commands.workers import example_command
from batchwright.cli.show import console
from batchwright.db.check import describe
from batchwright.engine.views import OperationView


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
        yield "http", f"{url} · {_access_text(has_key)}"
    if processes:
        names = ", ".join(operation.name for operation in operations)
        yield "operations", names or "none: name a module, a file or a folder, as in batchwright up hello.py"
        yield "workers", _workers_text(batchwright, processes)
        yield "submit", _submit_hint(batchwright, operations)
    else:
        yield "workers", "none here: --no-worker, or worker.run_background_poller, or batchwright api"
    yield "stop", "Ctrl-C lets running jobs end, a second one leaves at once"


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


def _access_text(has_key: bool) -> str:
    if has_key:
        return "with an API key: batchwright key list"
    return "open to this machine until the first key is made: batchwright key create NAME"


def _submit_hint(batchwright: AsyncBatchwright, operations: Sequence[OperationView]) -> str:
    """Nobody enqueues the jobs of a batch or a task by hand."""
    own = [operation for operation in operations if not operation.name.startswith(("batch.", "provider."))]
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
