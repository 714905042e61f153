"""`batchwright ingest estimate`: what a run would need, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.cli.flags import Config, DatabaseUrl, Json, on_part
from batchwright.cli.show import money, number, print_facts, print_json, seconds, show_meanwhile, size
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.ingest.commands.options import (
    ChunkCharacters,
    Collection,
    EmbeddingModel,
    EntityModel,
    Exclude,
    ForceAll,
    Include,
    OfLane,
    RunTenant,
    Sources,
    Urls,
    make_overrides,
    name_sources,
)
from batchwright.ingest.commands.show import range_text
from batchwright.ingest.forecast import Forecast, forecast
from batchwright.ingest.part import IngestPart
from batchwright.ingest.submission import WantedRun

_LANES = {"realtime": "in realtime", "batch": "as batches"}


def estimate(
    collection: Collection,
    sources: Sources = None,
    urls: Urls = None,
    include: Include = None,
    exclude: Exclude = None,
    lane: OfLane = None,
    embedding_model: EmbeddingModel = None,
    entities: EntityModel = None,
    chunk_characters: ChunkCharacters = None,
    force: ForceAll = False,
    tenant: RunTenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Estimate what a run would need: pages, tokens, cost and time. Nothing is stored, and no model is called.

    The command lists the sources and reads some documents of each format. For a figure such as 120 (90 to 150), the
    real value lies between the bounds in about 19 of 20 cases.
    """
    names = name_sources(sources or (), urls)
    wanted = WantedRun(
        tenant=tenant,
        collection=collection,
        sources=names,
        overrides=make_overrides(names, include, exclude, embedding_model, entities, chunk_characters, force),
        lane=lane.value if lane is not None else None,
    )

    async def go(part: IngestPart) -> Forecast:
        with show_meanwhile("reading a sample …"):
            return await forecast(part, wanted)

    def tell(found: Forecast) -> int:
        if json:
            print_json(found.document())
        else:
            print_forecast(found)
        return 0

    on_part(IngestPart, go, tell, database_url, config)


def print_forecast(found: Forecast) -> None:
    said = found.document()
    costs = [(lane, said["cost"].get(lane)) for lane in _LANES]
    print_facts(
        [
            ("documents", _documents(found)),
            ("left out", ", ".join(f"{number(n)} {reason}" for reason, n in found.skipped.items())),
            ("sampled", _sampled(found)),
            ("pages", _figure(said["pages"])),
            ("tokens", _figure(said["tokens"])),
            ("chunks", _figure(said["chunks"])),
            ("will fail", _figure(said["failing"], is_shown_if_none=False)),
            ("requests", _requests(found, said)),
            ("models", ", ".join(f"{model} ({kind})" for kind, model in found.models.items())),
            *((f"cost {_LANES[lane]}", _cost(found, figure)) for lane, figure in costs if found.models),
            ("cost", None if found.models else "nothing: no model of a server is used"),
            ("time", _time(said["seconds"])),
            ("prices", "\n".join(said["price_sources"]) if found.models else None),
            ("unknown", "\n".join(found.unknown)),
        ]
    )


def _documents(found: Forecast) -> str:
    unchanged = f", and {number(found.unchanged)} unchanged" if found.unchanged else ""
    return f"{number(found.estimate.documents)} of {size(found.estimate.bytes)}{unchanged}"


def _sampled(found: Forecast) -> str:
    failed = ", ".join(f"{number(n)} {code}" for code, n in found.failing.items())
    return f"{number(found.estimate.sampled)}{f': {failed}' if failed else ''}"


def _requests(found: Forecast, said: Mapping[str, Any]) -> str | None:
    """Requests by purpose. Models that run in this process need no requests."""
    needed = {"embedding": said["embedding_requests"], "entities": said["entity_windows"]}
    parts = [f"{_figure(needed[kind])} for {kind}" for kind in found.models if needed.get(kind)]
    return ", ".join(parts) or None


def _figure(figure: Mapping[str, float] | None, *, is_shown_if_none: bool = True) -> str | None:
    if figure is None or not (is_shown_if_none or figure["high"]):
        return None
    if figure["low"] == figure["high"]:
        return number(figure["value"])
    return f"{number(figure['value'])} ({number(figure['low'])} to {number(figure['high'])})"


def _cost(found: Forecast, figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "unknown"
    return range_text(figure) if figure["high"] else money(0)


def _time(figure: Mapping[str, Any] | None) -> str | None:
    if figure is None:
        return None
    return f"{seconds(figure['value'])} at the limits of the model servers, in realtime"
