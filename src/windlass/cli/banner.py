"""What `windlass up` and `windlass api` say when they run: where, what, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from windlass.app import VERSION, AsyncWindlass
from windlass.cli.show import console
from windlass.cli.workers import example
from windlass.db.check import describe
from windlass.engine.views import OperationView


def banner(
    windlass: AsyncWindlass, operations: Sequence[OperationView], *, url: str | None, has_key: bool, processes: int
) -> Iterator[tuple[str, str]]:
    yield "database", _database(windlass)
    if url is not None:
        yield "http", f"{url} · {_who(has_key)}"
    if processes:
        names = ", ".join(operation.name for operation in operations)
        yield "operations", names or "none: name a module, a file or a folder, as in windlass up hello.py"
        yield "workers", _workers(windlass, processes)
        yield "submit", _submit(windlass, operations)
    else:
        yield "workers", "none here: --no-worker, or worker.run_background_poller, or windlass api"
    yield "stop", "Ctrl-C lets running jobs end, a second one leaves at once"


def print_banner(lines: Iterator[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(f"  {name}", "cyan"), Text(text))
    out = console()
    out.print(Text(f"Windlass {VERSION}", "bold"))
    out.print(grid)


def _database(windlass: AsyncWindlass) -> str:
    if windlass.embedded is not None:
        return f"embedded PostgreSQL {windlass.embedded.major} in {windlass.embedded.root}"
    return describe(windlass.pool.url)


def _who(has_key: bool) -> str:
    if has_key:
        return "with an API key: windlass key list"
    return "open to this machine until the first key is made: windlass key create NAME"


def _submit(windlass: AsyncWindlass, operations: Sequence[OperationView]) -> str:
    """Nobody enqueues the jobs of a batch by hand."""
    own = [operation for operation in operations if not operation.name.startswith("batch.")]
    if own:
        return example(own[0])
    if windlass.settings.has_gateways:
        return "windlass batch submit FILE --wait"
    return "windlass job submit TYPE --payload '{…}' --watch"


def _workers(windlass: AsyncWindlass, processes: int) -> str:
    settings = windlass.settings.worker
    queues = ", ".join(settings.queues) if settings.queues else "all queues"
    how_many = "1 process" if processes == 1 else f"{processes} processes"
    return f"{how_many} · {settings.concurrency} jobs at a time each · {queues}"
