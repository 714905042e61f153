"""Groq: OpenAI's batch API at another address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from batchwright.inference.http import MIB
from batchwright.providers.dialects.openai import OpenAIAdapter, OpenAISettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GroqSettings(OpenAISettings):
    base_url: str = "https://api.groq.com/openai/v1"
    api_key_env: str | None = "GROQ_API_KEY"


class GroqAdapter(OpenAIAdapter):
    name = "groq"
    title = "Groq"
    abilities = replace(OpenAIAdapter.abilities, request_bytes_max=100 * MIB, timeout_hours=7 * 24 + 2)
    Settings = GroqSettings
    endpoints: ClassVar[Sequence[str]] = ("/v1/chat/completions",)
