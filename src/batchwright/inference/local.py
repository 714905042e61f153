"""Vectors computed in this process: no key, no network, no cost.

The weights and the vocabulary are those in the wheel of wordllama. Its code is not imported: it loads an HTTP client,
sets up logging for the whole process, and takes several times as long for the same vectors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
import zlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from batchwright.errors import ConfigurationError
from batchwright.inference.calls import EMBEDDING, Ledger
from batchwright.inference.sending import settle_here
from batchwright.inference.vectors import normalise

_VERSION = 1
_DIMENSIONS = 256
_TOKENS_MAX = 1 << 20
"""A local vector is a sum, so there is no window that a text must fit into."""
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_VOCABULARY = "tokenizers/l2_supercat_tokenizer_config.json"
_NEEDED = ("wordllama", "numpy", "safetensors", "tokenizers")
_SPACE = "\u2581"
"""The vocabulary's character for a space. In an entry it is always first, and no entry has a line break."""
_PIECE = re.compile(f"{_SPACE}*[^{_SPACE}\\n]+|{_SPACE}+|\\n")
_SPECIAL = ("<s>", "</s>", "<unk>")
_CACHED_PIECES_MAX = 200_000
_CACHED_PIECE_CHARACTERS_MAX = 32
_WORD = re.compile(r"\w+")
_TRIGRAM_WEIGHT = 0.25


class _Local(ABC):
    """An embedder that works in a thread of this process."""

    fingerprint: str
    model: str | None = None
    dimensions: int | None = _DIMENSIONS
    tokens_max: int = _TOKENS_MAX

    @cached_property
    def _turns(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(1)

    async def embed(self, texts: Mapping[bytes, str], ledger: Ledger) -> None:
        await settle_here(EMBEDDING, texts, self.vectors, ledger, self._turns)

    async def embed_query(self, text: str) -> bytes:
        return (await asyncio.to_thread(self.vectors, [text]))[0]

    @abstractmethod
    def vectors(self, texts: Sequence[str]) -> list[bytes]:
        """One vector for each text, even for an empty one."""


class HashEmbedder(_Local):
    """Hashes words and their three-character parts: each is added to the dimension that its checksum selects.

    It needs no weights and knows no synonyms: for tests, and for machines without the extra.
    """

    fingerprint = f"hash:{_VERSION}:{_DIMENSIONS}"

    def vectors(self, texts: Sequence[str]) -> list[bytes]:
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> bytes:
        vector = array("f", bytes(4 * _DIMENSIONS))
        for word, count in Counter(_WORD.findall(text.casefold())).items():
            parts = f"<{word}>".encode()
            _add(vector, parts, count**0.5)
            for start in range(len(parts) - 2):
                _add(vector, parts[start : start + 3], _TRIGRAM_WEIGHT * count**0.5)
        return normalise(vector) or _nothing()


class LocalEmbedder(_Local):
    """The mean of the static vectors of a text's tokens, as in wordllama: similar words are close to one another."""

    def __init__(self) -> None:
        self._folder = _find_package()
        digest = xxhash.xxh3_64()
        for name in (_WEIGHTS, _VOCABULARY):
            digest.update((self._folder / name).read_bytes())
        self.fingerprint = f"wordllama:{_VERSION}:{_DIMENSIONS}:{digest.hexdigest()}"
        self._model: _Model | None = None
        self._loading = threading.Lock()

    def vectors(self, texts: Sequence[str]) -> list[bytes]:
        with self._loading:
            self._model = self._model or _Model(self._folder)
        return [self._model.vector(text) for text in texts]


class _Model:
    """Weights and vocabulary in memory, with a cache of the tokens of known words."""

    def __init__(self, folder: Path) -> None:
        import numpy
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._numpy = numpy
        self._weights = load_file(folder / _WEIGHTS)["embedding.weight"].astype(numpy.float32)
        self._tokenizer: Any = Tokenizer.from_file(str(folder / _VOCABULARY))
        self._bpe: Any = self._tokenizer.model
        self._pieces: dict[str, bytes] = {}

    def vector(self, text: str) -> bytes:
        numpy = self._numpy
        tokens = numpy.frombuffer(self._tokens(text), dtype=numpy.int32)
        if not len(tokens):
            return _nothing()
        total = self._weights.take(tokens, axis=0).sum(axis=0)
        return bytes((total / numpy.linalg.norm(total)).astype("<f4").tobytes())

    def _tokens(self, text: str) -> bytes:
        """The tokens of the whole text, word by word: no token spans two words, and most words were seen before."""
        if not text:
            return b""
        if any(special in text for special in _SPECIAL):
            return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        pieces = _PIECE.findall(_SPACE + text.replace(" ", _SPACE))
        known = self._pieces
        return b"".join([known.get(piece) or self._tokenise(piece) for piece in pieces])

    def _tokenise(self, piece: str) -> bytes:
        tokens = array("i", [token.id for token in self._bpe.tokenize(piece)]).tobytes()
        if len(piece) <= _CACHED_PIECE_CHARACTERS_MAX:
            if len(self._pieces) >= _CACHED_PIECES_MAX:
                self._pieces = {}
            self._pieces[piece] = tokens
        return tokens


def _find_package() -> Path:
    """The folder of wordllama, found without importing it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    found = importlib.util.find_spec("wordllama")
    if missing or found is None or not found.submodule_search_locations:
        raise ConfigurationError(
            f"local embeddings need {', '.join(missing)}: pip install 'batchwright[documents]', "
            "or configure an embedding model on a server"
        )
    folder = Path(found.submodule_search_locations[0])
    for name in (_WEIGHTS, _VOCABULARY):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"the installed wordllama has no {name}; install a release that has: pip install 'wordllama>=0.4,<0.5'"
            )
    return folder


def _add(vector: array[float], feature: bytes, weight: float) -> None:
    place = zlib.crc32(feature)
    vector[place % _DIMENSIONS] += weight if place & 0x8000_0000 else -weight


def _nothing() -> bytes:
    """An arbitrary direction, for a text without words."""
    return normalise(array("f", [1.0, *bytes(_DIMENSIONS - 1)])) or b""
