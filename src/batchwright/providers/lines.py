"""Lines of a stream, with bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

LINE_BYTES_MAX = 64 * 1024 * 1024
"""A longer line is skipped: only a broken answer of a model is that long."""


async def split_lines(chunks: AsyncIterator[bytes], bytes_max: int = LINE_BYTES_MAX) -> AsyncIterator[bytes | None]:
    """Every line that is not empty; None for a line that is too long. Only a line feed ends a line."""
    held: list[bytes] = []
    size = 0
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line = _line(held, part, size, bytes_max)
            held, size = [], 0
            if line is None or line.strip():
                yield line
        size += len(rest)
        if size > bytes_max:
            held.clear()
        elif rest:
            held.append(rest)
    if size:
        line = _line(held, b"", size, bytes_max)
        if line is None or line.strip():
            yield line


def _line(held: list[bytes], last: bytes, size: int, bytes_max: int) -> bytes | None:
    return None if size + len(last) > bytes_max else b"".join([*held, last])
