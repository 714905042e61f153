"""Builds bodies and parses answers of /v1/embeddings; a vector is float32, little-endian, of length 1."""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from batchwright.errors import SchemaInvalid

URL = "/v1/embeddings"
_FLOAT_BYTES = 4
_LENGTH_TOLERANCE = 1e-6


def embedding_body(
    model: str, texts: Sequence[str], dimensions: int | None = None, *, is_base64: bool = True
) -> dict[str, Any]:
    """A request for one vector for each text."""
    body: dict[str, Any] = {"model": model, "input": list(texts)}
    if dimensions is not None:
        body["dimensions"] = dimensions
    if is_base64:
        body["encoding_format"] = "base64"
    return body


def parse_embeddings(body: bytes, count: int) -> list[bytes]:
    """The vectors of an answer in the order of its inputs; raises SchemaInvalid unless all are present and usable."""
    vectors = read_vectors(body, count)
    usable = [vector for vector in vectors if vector is not None]
    if len(usable) < count:
        places = [place for place, vector in enumerate(vectors) if vector is None]
        raise SchemaInvalid(
            f"{len(places)} of {count} vectors are zero or not finite, the first is number {places[0]}",
            code="invalid_vector",
        )
    return usable


def read_vectors(body: bytes, count: int) -> list[bytes | None]:
    """Like parse_embeddings, with None for a vector that is zero or not finite."""
    try:
        data = _decode(body).data
    except msgspec.DecodeError:
        raise SchemaInvalid("the answer does not have the format of /v1/embeddings", code="invalid_output") from None
    placed = {place if one.index is None else one.index: one.embedding for place, one in enumerate(data)}
    if len(data) != count or placed.keys() != set(range(count)):
        message = f"the answer has {len(data)} vectors for {count} inputs, or not one for each"
        raise SchemaInvalid(message, code="wrong_count")
    raw = [_floats(placed[place]) for place in range(count)]
    if len({len(vector) for vector in raw}) > 1:
        raise SchemaInvalid("the vectors of one answer differ in their dimensions", code="wrong_dimensions")
    return [normalise(vector) for vector in raw]


def normalise(vector: array[float]) -> bytes | None:
    """The vector scaled to length 1; None if it has no direction."""
    length = math.hypot(*vector)
    if not 0 < length < math.inf:
        return None
    if abs(length - 1) > _LENGTH_TOLERANCE:
        vector = array("f", [number / length for number in vector])
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def dimensions_of(vector: bytes) -> int:
    return len(vector) // _FLOAT_BYTES


class _Embedding(msgspec.Struct):
    index: int | None = None
    embedding: str | list[float] = ""


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


_decode = msgspec.json.Decoder(_Embeddings).decode


def _floats(embedding: str | list[float]) -> array[float]:
    try:
        if isinstance(embedding, list):
            vector = array("f", embedding)
        else:
            vector = array("f", base64.b64decode(embedding, validate=True))
            if sys.byteorder == "big":
                vector.byteswap()
    except (binascii.Error, OverflowError, ValueError):
        raise SchemaInvalid("an embedding is neither numbers nor base64 of float32", code="invalid_output") from None
    if not vector:
        raise SchemaInvalid("an embedding is empty", code="invalid_output")
    return vector
