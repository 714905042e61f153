"""Azure OpenAI: OpenAI's batch API with another header; models are deployments, and slow batches do not expire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from batchwright.errors import ConfigurationError
from batchwright.providers import completions
from batchwright.providers.contract import Request
from batchwright.providers.dialects.openai import OpenAIAdapter, OpenAISettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOpenAISettings(OpenAISettings):
    """A resource of Azure OpenAI."""

    base_url: str = ""
    """`https://{resource}.openai.azure.com/openai/v1`; with an api_version, without `/v1`."""
    api_key_env: str | None = "AZURE_OPENAI_API_KEY"
    api_version: str | None = None
    """The version of the API for resources that do not have `/openai/v1` yet."""

    def __post_init__(self) -> None:
        if not self.base_url:
            raise ConfigurationError(
                "azure_openai needs its base_url; write it like https://my-resource.openai.azure.com/openai/v1"
            )
        super(AzureOpenAISettings, self).__post_init__()


class AzureOpenAIAdapter(OpenAIAdapter):
    name = "azure_openai"
    title = "Azure OpenAI"
    abilities = replace(OpenAIAdapter.abilities, requests_max=100_000, timeout_hours=72)
    Settings = AzureOpenAISettings
    endpoints: ClassVar[Sequence[str]] = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
    )

    async def headers(self) -> Mapping[str, str]:
        return {"api-key": self.key}

    def query(self) -> Mapping[str, str]:
        return {} if self.settings.api_version is None else {"api-version": self.settings.api_version}

    def batch_endpoint(self, request: Request) -> str:
        """Azure writes endpoints without their version, except in the newest API."""
        endpoint = completions.endpoint_of(request)
        return endpoint if endpoint == "/v1/responses" else endpoint.removeprefix("/v1")
