"""Together: OpenAI's batch API at another address, without metadata."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar
from urllib.parse import quote

from batchwright.errors import Transient
from batchwright.inference.http import MIB, Upload, multipart
from batchwright.providers.dialects.openai import OpenAIAdapter, OpenAISettings
from batchwright.providers.errors import error_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherSettings(OpenAISettings):
    base_url: str = "https://api.together.xyz/v1"
    api_key_env: str | None = "TOGETHER_API_KEY"
    has_metadata: bool = False


class TogetherAdapter(OpenAIAdapter):
    name = "together"
    title = "Together"
    abilities = replace(
        OpenAIAdapter.abilities,
        request_bytes_max=100 * MIB,
        batch_discount=None,  # up to a half, depending on the model
        duplicates="The uploaded file's id finds the batch in the list.",
    )
    Settings = TogetherSettings
    endpoints: ClassVar[Sequence[str]] = ("/v1/chat/completions", "/v1/audio/transcriptions")

    async def upload(self, filename: str, lines: Upload) -> str:
        """Together's protocol: ask for an address, upload there without the key, confirm. The address is not stored."""
        asked = multipart({"purpose": "batch-api", "file_name": filename, "file_type": "jsonl"})
        where = await self.service.ask("POST", "/files", body=asked)
        url, id = where.headers.get("location"), where.headers.get("x-together-file-id")
        if where.status != 302 or not url or not id:
            raise error_of(self.errors, where, now=time.time())
        put = await self.tools.http.ask("PUT", url, body=lines)
        if not put.is_ok:
            raise Transient(f"the upload to Together's store failed with status {put.status}", code="upload_refused")
        await self.ask("POST", f"/files/{quote(id, safe='')}/preprocess")
        return id
