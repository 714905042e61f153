"""`batchwright simulate`: a simulated model server, for trying, testing and planning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from batchwright.cli.flags import Json, TetherDescriptor, parse_time_span
from batchwright.cli.loop import loop_factory, spare_the_collector
from batchwright.cli.show import console, print_facts, print_json, print_table
from batchwright.cli.stop import Stop, Tether
from batchwright.errors import InvalidInput
from batchwright.simulator import PROFILES, Profile, Simulator, SimulatorSettings, named_model, profile

_EXAMPLE = '{"model": "%s", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]}'

_PORT = 9000
_PROVIDERS_PORT = 9100
"""A different port, so that both simulators can run at the same time."""

Models = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[:PROFILE]", help="A model to serve; may be repeated.", show_default=False),
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Serve any other model too; the default if no model is named.")
]
ProfileName = Annotated[
    str, typer.Option("--profile", help=f"Capacity of models that do not name a profile: {', '.join(PROFILES)}.")
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help=f"Port; 0 picks a free one. By default {_PORT}, and {_PROVIDERS_PORT} with --providers.",
        show_default=False,
    ),
]
Prefill = Annotated[
    float | None,
    typer.Option(min=0, metavar="TOKENS/S", help="Prompt tokens read per second; 0 takes no time.", show_default=False),
]
Decode = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="TOKENS/S",
        help="Tokens per second written for a single request; 0 takes no time.",
        show_default=False,
    ),
]
DecodeTotal = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="TOKENS/S",
        help="Maximum tokens per second over all requests; 0 sets no limit.",
        show_default=False,
    ),
]
MaxRunning = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of requests that run at the same time.", show_default=False)
]
MaxWaiting = Annotated[
    int | None, typer.Option(min=0, help="Maximum number of waiting requests; unlimited if unset.", show_default=False)
]
RefuseStatus = Annotated[
    int | None, typer.Option(help="Status for requests over that limit: 429 or 503.", show_default=False)
]
CacheBlocks = Annotated[
    int | None, typer.Option(min=0, help="Blocks of 16 tokens in the prefix cache.", show_default=False)
]
OutputTokens = Annotated[
    float | None, typer.Option(min=1, help="Median length of answers that have no maximum.", show_default=False)
]
OutputSigma = Annotated[
    float | None, typer.Option(min=0, help="Spread of that length; 0 for none.", show_default=False)
]
TimeScale = Annotated[float, typer.Option(help="Speed, as a multiple of real time.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the answers; equal seeds give equal answers.")]
Faults = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND[:SHARE][:NAME=VALUE]", help="Make requests fail; may be repeated.", show_default=False),
]
PromptFaults = Annotated[bool, typer.Option(help="Whether [[fault:500]] in a prompt makes its request fail.")]
ApiKey = Annotated[str | None, typer.Option(help="Bearer key that requests must send.", show_default=False)]
Providers = Annotated[
    bool, typer.Option("--providers", help="Simulate the batch APIs of outside providers instead of a model server.")
]
QueueTime = Annotated[
    str,
    typer.Option(
        "--queue-time",
        "--queue-seconds",
        metavar="DURATION",
        help="With --providers: time that a job waits before it runs.",
    ),
]
RunTime = Annotated[
    str,
    typer.Option("--run-time", "--run-seconds", metavar="DURATION", help="With --providers: time that a job runs."),
]
WriteConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="With --providers: write the settings to this file, and the variables to FILE.env.",
        show_default=False,
    ),
]
_OF_PROVIDERS = {"queue_time", "run_time", "write_config"}
_OF_BOTH = {"providers", "host", "port", "time_scale", "seed", "fault", "api_key", "json", "tether"}


def simulate(
    context: typer.Context,
    model: Models = None,
    any_model: AnyModel = False,
    profile_name: ProfileName = "fast",
    host: Host = "127.0.0.1",
    port: Port = None,
    prefill: Prefill = None,
    decode: Decode = None,
    decode_total: DecodeTotal = None,
    max_running: MaxRunning = None,
    max_waiting: MaxWaiting = None,
    refuse_status: RefuseStatus = None,
    cache_blocks: CacheBlocks = None,
    output_tokens: OutputTokens = None,
    output_sigma: OutputSigma = None,
    time_scale: TimeScale = 1.0,
    seed: Seed = 0,
    fault: Faults = None,
    prompt_faults: PromptFaults = True,
    api_key: ApiKey = None,
    providers: Providers = False,
    queue_time: QueueTime = "2s",
    run_time: RunTime = "8s",
    write_config: WriteConfig = None,
    json: Json = False,
    tether: TetherDescriptor = None,
) -> None:
    """Simulate a model server: OpenAI's endpoints, with a model of its speed, a prefix cache, and faults on demand.

    Runs until SIGTERM or Ctrl-C, and then prints what it received. Example:
    `batchwright simulate --model qwen:7b --max-running 64`.

    With --providers it speaks the batch APIs of outside providers, and prints the settings for tasks. Example:
    `batchwright simulate --providers --write-config providers.toml`.
    """
    _refuse_others(context, providers)
    if providers:
        from batchwright.cli.commands.simulate_providers import simulate_providers
        from batchwright.simulator.providers import ProviderSettings

        jobs = ProviderSettings(
            api_key=api_key,
            faults=fault or (),
            queue_seconds=parse_time_span("--queue-time", queue_time) or 0.0,
            run_seconds=parse_time_span("--run-time", run_time) or 0.0,
            seed=seed,
            speed=time_scale,
        )
        simulate_providers(
            jobs,
            host,
            _PROVIDERS_PORT if port is None else port,
            write_config=write_config,
            is_json=json,
            tether=tether,
        )
        return
    given = {
        "prefill_rate": prefill,
        "decode_rate": decode,
        "decode_rate_total": decode_total,
        "max_running": max_running,
        "max_waiting": max_waiting,
        "refuse_status": refuse_status,
        "cache_blocks": cache_blocks,
        "output_tokens": output_tokens,
        "output_sigma": output_sigma,
    }
    values = {name: value for name, value in given.items() if value is not None}
    pairs = [named_model(text, profile_name) for text in model or ()]
    settings = SimulatorSettings(
        models={name: profile(found).with_values(values) for name, found in pairs},
        any_model=profile(profile_name).with_values(values) if any_model or not pairs else None,
        api_key=api_key,
        faults=fault or (),
        is_prompt_obeyed=prompt_faults,
        seed=seed,
        time_scale=time_scale,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        stats = runner.run(_simulate(settings, host, _PORT if port is None else port, json, tether))
    if json:
        print_json(stats, indent=False)
    else:
        _print_summary(stats)


def _refuse_others(context: typer.Context, providers: bool) -> None:
    """A flag of the other simulator would do nothing, so it is refused."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _OF_BOTH or (name in _OF_PROVIDERS) == providers:
            continue
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            why = "cannot be used with --providers" if providers else "needs --providers"
            raise InvalidInput(f"{parameter.opts[0]} {why}")


async def _simulate(
    settings: SimulatorSettings, host: str, port: int, is_json: bool, tether: int | None
) -> dict[str, Any]:
    stop = Stop()
    stop.listen()
    if tether is not None:
        Tether(tether, stop, 0.0)
    simulator = await Simulator(settings).open(host, port)
    spare_the_collector()
    if is_json:
        print_json({"url": simulator.url}, indent=False)
    else:
        _print_banner(simulator)
    await stop.asked.wait()
    stats = simulator.stats()
    await simulator.close()
    return stats


def _print_banner(simulator: Simulator) -> None:
    settings = simulator.settings
    grid = Table.grid(padding=(0, 2))
    shown = [*settings.models.items(), *([("any other", settings.any_model)] if settings.any_model else [])]
    for name, one in shown:
        grid.add_row(Text("  model", "cyan"), Text(f"{name}: {_capacity_text(one)}"))
    for rule in settings.faults:
        grid.add_row(Text("  fault", "cyan"), Text(rule))
    if settings.time_scale != 1:
        grid.add_row(Text("  time", "cyan"), Text(f"{settings.time_scale:g} times as fast as real time"))
    first = next(iter(settings.models), "demo")
    key = " -H 'authorization: Bearer …'" if settings.api_key else ""
    grid.add_row(Text("  try", "cyan"), Text(f"curl {simulator.url}/v1/chat/completions{key} -d '{_EXAMPLE % first}'"))
    grid.add_row(Text("  counts", "cyan"), Text(f"curl {simulator.url}/simulator/stats"))
    grid.add_row(Text("  stop", "cyan"), Text("Ctrl-C, which prints what it received"))
    out = console()
    out.print(Text(f"Simulated model server on {simulator.url}", "bold"))
    out.print(grid)


def _capacity_text(one: Profile) -> str:
    def rate(value: float) -> str:
        return f"{value:g} tokens/s" if value else "at once"

    ceiling = f", {one.decode_rate_total:g} in all" if one.decode_rate and one.decode_rate_total else ""
    waiting = "" if one.max_waiting is None else f", {one.max_waiting} wait"
    return f"reads {rate(one.prefill_rate)}, writes {rate(one.decode_rate)}{ceiling}; {one.max_running} run{waiting}"


def _print_summary(stats: dict[str, Any]) -> None:
    answered = ", ".join(f"{n} with {status}" for status, n in stats["answered"].items())
    print_facts(
        [
            ("received", f"{stats['received']} requests, {stats['repeated']} of them repeated"),
            ("answered", answered or "none"),
            ("aborted", stats["aborted"]["total"]),
            ("at once", f"{stats['in_flight_max']} requests on {stats['connections']['open_max']} connections"),
            ("connections", stats["connections"]["opened"]),
            ("faults", ", ".join(f"{n} {kind}" for kind, n in stats["faults"].items())),
        ]
    )
    if models := list(stats["models"].items()):
        _print_models(models)


def _print_models(models: Sequence[tuple[str, dict[str, Any]]]) -> None:
    def column(show: Callable[[dict[str, Any]], str]) -> list[Text]:
        return [Text(show(one)) for _, one in models]

    print_table(
        {
            "model": [Text(name) for name, _ in models],
            "served": column(lambda one: str(one["served"])),
            "refused": column(lambda one: str(one["refused"] or "")),
            "prompt tokens": column(lambda one: str(one["prompt_tokens"])),
            "cached": column(lambda one: f"{one['cached_tokens'] / max(1, one['prompt_tokens']):.0%}"),
            "written tokens": column(lambda one: str(one["completion_tokens"])),
            "used": column(lambda one: f"{one['utilisation']:.0%}"),
            "waited p95": column(lambda one: f"{one['wait_seconds']['p95']:.2f} s"),
            "took p95": column(lambda one: f"{one['total_seconds']['p95']:.2f} s"),
        }
    )
