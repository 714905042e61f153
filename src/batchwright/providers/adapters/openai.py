"""OpenAI, and any service that speaks its batch API at the base URL of the settings."""

from __future__ import annotations

from batchwright.providers.dialects.openai import OpenAIAdapter


class OpenAI(OpenAIAdapter):
    """OpenAI itself, unless the settings name another service."""

    name = "openai"
    title = "OpenAI"
