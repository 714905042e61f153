"""The configuration of Batchwright for a contract server: tables of settings, and environment variables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from batchwright.simulator.providers.server import Server

KEY = "SIMULATED_PROVIDER_KEY"
"""The variable that holds the credential of every provider."""
MARK = "# Written by batchwright simulate --providers."
_ANY_KEY = "simulated"
_KEYED = ("anthropic", "azure", "azure_openai", "gemini", "groq", "mistral", "openai", "sarvam", "together")

Table = Mapping[str, str | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration that a worker and the command line need."""

    tables: Mapping[str, Table]
    """By their names in the settings file."""
    environment: Mapping[str, str]

    def as_toml(self) -> str:
        tables = [f"[{name}]\n{_settings(table)}" for name, table in self.tables.items()]
        return "\n".join([f"{MARK}\n", *tables])

    def as_shell(self) -> str:
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items()]
        return "".join([f"{MARK}\n", *lines])


def configure(server: Server, *, poll_seconds: float = 1.0) -> Configuration:
    """All providers at this server.

    This includes the buckets of google, vertex and aws. Their addresses are in the environment, because that is where
    the client of object stores looks for them.
    """
    tables: dict[str, Table] = {"tasks": {"poll_interval_seconds": poll_seconds}}
    for name in _KEYED:
        tables[f"providers.{name}"] = {"base_url": server.urls[name], "api_key_env": KEY}
    for name in ("google", "vertex"):
        tables[f"providers.{name}"] = {
            "base_url": server.urls[name],
            "project": "simulated",
            "bucket": f"gs://simulated/{name}",
            "access_token_env": KEY,
        }
    tables["providers.aws"] = {
        "base_url": server.urls["aws"],
        "region": "us-east-1",
        "bucket": "s3://simulated/aws",
        "access_key_id_env": KEY,
        "secret_access_key_env": KEY,
    }
    return Configuration(tables=dict(sorted(tables.items())), environment=_environment(server))


def _environment(server: Server) -> dict[str, str]:
    key = server.settings.api_key or _ANY_KEY
    account = {"gcs_base_url": server.urls["gcs"], "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return {
        KEY: key,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": key,
        "AWS_ENDPOINT_URL": server.urls["s3"],
        "AWS_REGION": "us-east-1",
        "GOOGLE_SERVICE_ACCOUNT_KEY": orjson.dumps(account).decode(),
    }


def _settings(table: Table) -> str:
    """Strings and numbers are the same in TOML and JSON."""
    return "".join(f"{name} = {orjson.dumps(value).decode()}\n" for name, value in table.items())
