"""`batchwright simulate --providers`: the batch APIs of twelve providers on one port, without an account."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from batchwright.cli.loop import loop_factory
from batchwright.cli.show import console, print_facts, print_json
from batchwright.cli.stop import Stop, Tether
from batchwright.cli.targets import Target, open_target
from batchwright.errors import InvalidInput
from batchwright.simulator.providers import ProviderSettings, Server
from batchwright.simulator.providers.configuration import MARK, Configuration, configure

_CONFIG = "BATCHWRIGHT_CONFIG"


def simulate_providers(
    settings: ProviderSettings, host: str, port: int, *, write_config: Path | None, is_json: bool, tether: int | None
) -> None:
    """Run until a signal, then print what was received."""
    targets = _open_targets(write_config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        stats = runner.run(_serve(settings, host, port, targets, is_json, tether))
    if is_json:
        print_json(stats, indent=False)
    else:
        _print_summary(stats)


async def _serve(
    settings: ProviderSettings,
    host: str,
    port: int,
    targets: tuple[Target, Target] | None,
    is_json: bool,
    tether: int | None,
) -> dict[str, Any]:
    stop = Stop()
    stop.listen()
    if tether is not None:
        Tether(tether, stop, 0.0)
    server = await Server(settings).open(host, port, port and port + 1)
    try:
        configuration = configure(server)
        if targets is not None:
            _write(configuration, *targets)
        if is_json:
            urls = {"url": server.url, "signed_url": server.signed_url}
            print_json(
                {**urls, "settings": configuration.tables, "environment": configuration.environment}, indent=False
            )
        else:
            _print_banner(server, configuration, targets)
        await stop.asked.wait()
        return server.stats()
    finally:
        await server.close()


# Files ------------------------------------------------------------------------------------------------------------


def _open_targets(path: Path | None) -> tuple[Target, Target] | None:
    """The files for the settings and the variables; files that this command did not write are not overwritten."""
    if path is None:
        return None
    found = open_target("--write-config", path), open_target("--write-config", path.with_suffix(".env"))
    for target in found:
        if target.path is None:
            raise InvalidInput(f"--write-config {target} is not a file; name one, such as providers.toml")
        if target.is_there and not target.head().startswith(MARK.encode()):
            raise InvalidInput(
                f"--write-config {target} exists already, and this command did not write it; name another file"
            )
    return found


def _write(configuration: Configuration, settings: Target, variables: Target) -> None:
    with settings.replace() as stream:
        stream.write(configuration.as_toml().encode())
    named = replace(configuration, environment={**configuration.environment, _CONFIG: str(settings)})
    with variables.replace() as stream:
        stream.write(named.as_shell().encode())


# Output -----------------------------------------------------------------------------------------------------------


def _print_banner(server: Server, configuration: Configuration, targets: tuple[Target, Target] | None) -> None:
    out = console()
    out.print(Text(f"Simulated providers on {server.url}", "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, text in _lines(server, targets):
        grid.add_row(Text(f"  {name}", "cyan"), Text(text))
    out.print(grid)
    if targets is None:
        typer.echo(f"\n{configuration.as_toml()}\n{configuration.as_shell()}", nl=False)


def _lines(server: Server, targets: tuple[Target, Target] | None) -> list[tuple[str, str]]:
    settings = server.settings
    speed = "" if settings.speed == 1 else f", {settings.speed:g} times as fast as real time"
    lines = [("jobs", f"wait {settings.queue_seconds:g} s, run {settings.run_seconds:g} s{speed}")]
    lines += [("fault", rule) for rule in settings.faults]
    if targets is None:
        lines.append(("settings", "paste the tables below into batchwright.toml, and the last lines into each shell"))
        lines.append(("work", "batchwright up"))
    else:
        lines.append(("settings", f"{targets[0]}"))
        lines.append(("work", f". {targets[1]} && batchwright up"))
    lines += [
        ("try", "batchwright task submit FILE --provider sarvam --wait"),
        ("counts", f"curl {server.url}/simulator/stats"),
        ("stop", "Ctrl-C, which prints what it received"),
    ]
    return lines


def _print_summary(stats: dict[str, Any]) -> None:
    by_provider: Counter[str] = Counter()
    for name, count in stats["jobs"].items():
        by_provider[name.partition(".")[0]] += count
    print_facts(
        [
            ("jobs", ", ".join(f"{count} {name}" for name, count in sorted(by_provider.items())) or "none"),
            ("requests", sum(stats["requests"].values())),
            ("leaks", f"{stats['leaks']} requests sent a credential to a signed URL" if stats["leaks"] else None),
        ]
    )
