"""What worker processes need to run tasks against a contract server in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchwright.simulator.providers import Server
from tests.providers.task_stage import SECRET, VARIABLE, provider_tables


def environment_of(server: Server) -> dict[str, str]:
    """The environment of a worker: credentials, and the server's buckets."""
    account = {"gcs_base_url": server.urls["gcs"], "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return {
        VARIABLE: SECRET,
        "KEY_ID": "AKIATEST",
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": server.urls["s3"],
        "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "GOOGLE_ALLOW_HTTP": "true",
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
    }


def write_config(path: Path, server: Server, *, settle_seconds: float, **tables: dict[str, Any]) -> Path:
    """Write a configuration file that points all providers to the contract server."""
    tables["tasks"] = {"fetch_private": True, **tables.get("tasks", {})}
    tables["worker"] = {"stop_grace_seconds": 5.0, **tables.get("worker", {})}
    for name, table in provider_tables(server).items():
        tables[f"providers.{name}"] = {**table, "settle_seconds": settle_seconds}
    lines = [
        line
        for name, values in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), "")
    ]
    path.write_text("\n".join(lines))
    return path
