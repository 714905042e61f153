"""Transcripts: the text of an audio file depends on its name and its bytes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from batchwright.simulator.providers.jobs import Item, ItemResult
from batchwright.simulator.providers.world import World

_WORD_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Audio:
    """An audio file of a job."""

    index: int
    uri: str
    name: str
    data: bytes | None

    @property
    def words(self) -> list[str]:
        known = [] if self.data is None else ["with", str(len(self.data)), "bytes", f"{zlib.crc32(self.data):08x}"]
        return ["transcript", "of", self.name, *known]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def seconds(self) -> float:
        return _WORD_SECONDS * len(self.words)

    def timed(self) -> list[tuple[str, float, float]]:
        """Each word with its start and end."""
        return [(word, _WORD_SECONDS * n, _WORD_SECONDS * (n + 1)) for n, word in enumerate(self.words)]


def audio_item(world: World, index: int, uri: str) -> Item:
    """A file by its URI; a file that is missing from our buckets fails."""
    name = unquote(urlsplit(uri).path).rpartition("/")[2]
    blob, is_ours = world.object_at(uri)
    problem = f"{uri.partition('?')[0]} was not found" if is_ours and blob is None else None
    return Item(uri, Audio(index, uri, name, None if blob is None else blob.data), name, problem, 404)


def audio_of(outcome: ItemResult) -> Audio:
    audio: Audio = outcome.item.ask
    return audio
