"""What `batchwright check` looks at for batches: the gateways, and the object store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from batchwright.batches.store import PROCESS
from batchwright.db.check import Finding, Level
from batchwright.engine.worker.worker import host_name
from batchwright.errors import ConfigurationError, StorageError
from batchwright.inference.gateway import Gateways
from batchwright.storage.metrics import STORAGE_METRICS
from batchwright.storage.probe import probe
from batchwright.telemetry.metrics import Counts
from batchwright.webhooks.delivery import Webhooks
from batchwright.webhooks.part import WebhooksPart

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart

_CONNECT_SECONDS = 3.0
_STORE_PATIENCE_SECONDS = 3.0


async def check_gateways(part: BatchesPart) -> Finding:
    """Keys, certificates and secrets, as a worker reads them when it starts; and whether the servers are reachable."""
    settings = part.core.settings
    try:
        async with Gateways(settings.global_inference_gateway, settings.model_gateways, settings.inference) as gateways:
            endpoints = sorted({gateway.endpoint for gateway in gateways.all()})
        await Webhooks(part.core.part(WebhooksPart).settings).close()
    except ConfigurationError as error:
        return Finding("gateways", Level.ERROR, str(error), "correct that: no worker starts with it")
    if settings.passthrough_headers:
        try:
            part.seal.check()
        except ConfigurationError as error:
            text = f"headers are passed through, but batches that have them cannot be created: {error}"
            remedy = "set batches.header_key_file, or passthrough_headers = []"
            return Finding("gateways", Level.ERROR, text, remedy)
    if not endpoints:
        return Finding("gateways", Level.OK, "every model goes to an outside provider")
    reachable = await asyncio.gather(*(_is_reachable(endpoint) for endpoint in endpoints))
    if missing := [endpoint for endpoint, is_there in zip(endpoints, reachable, strict=True) if not is_there]:
        text = f"{', '.join(missing)} cannot be reached from here"
        remedy = "start the model server, or correct its url; batches wait for it"
        return Finding("gateways", Level.WARNING, text, remedy)
    return Finding("gateways", Level.OK, f"{', '.join(endpoints)} can be reached")


async def _is_reachable(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def check_store(part: BatchesPart) -> Finding:
    """Whether the store is reachable, from every process that needs it."""
    core = part.core
    store = core.open_store("check", Counts(STORAGE_METRICS), patience_seconds=_STORE_PATIENCE_SECONDS)
    try:
        await probe(store)
    except StorageError as error:
        return Finding("store", Level.ERROR, str(error), "repair that, or correct storage.url: batches need it")
    workers = await core.views.workers()
    hosts = {host_name(), *(worker.host for worker in workers if worker.is_alive and PROCESS in worker.operations)}
    if core.settings.storage.url is None and len(hosts) > 1:
        text = f"{store} is a folder of this machine, and batches run on {', '.join(sorted(hosts))}"
        return Finding("store", Level.WARNING, text, "set storage.url to a store that all of them share")
    return Finding("store", Level.OK, f"{store} stores, lists, reads and deletes objects")
