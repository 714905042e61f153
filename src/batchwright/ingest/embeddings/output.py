"""The result as a Parquet file: a row group for each batch, so that only one batch is in memory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchwright.ingest.embeddings.columns import require_arrow, require_parquet
from batchwright.ingest.embeddings.parts import decode_rows
from batchwright.private import open_private
from batchwright.storage import Store, Stored


async def write_parquet(store: Store, key: str, parts: Sequence[str], *, has_text_ids: bool) -> Stored:
    """Columns `id` and `embedding`; all ids are text if one of them is."""
    with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
        path = Path(folder) / "embeddings.parquet"
        open_private(path, "xb").close()  # the writer keeps the mode, and the store links the file
        writer: Any = None
        try:
            for part in parts:
                data = b"".join([chunk async for chunk in store.get(part)])
                writer = await asyncio.to_thread(_append, writer, path, data, has_text_ids)
        finally:
            if writer is not None:
                await asyncio.to_thread(writer.close)
        return await store.put_file(key, path)


def _append(writer: Any, path: Path, data: bytes, has_text_ids: bool) -> Any:
    pyarrow, parquet = require_arrow(), require_parquet()
    ids, numbers = decode_rows(data)
    values = pyarrow.Array.from_buffers(pyarrow.float32(), len(numbers) // 4, [None, pyarrow.py_buffer(numbers)])
    column = pyarrow.FixedSizeListArray.from_arrays(values, len(numbers) // 4 // len(ids))
    names = pyarrow.array(map(str, ids), pyarrow.string()) if has_text_ids else pyarrow.array(ids, pyarrow.int64())
    table = pyarrow.table({"id": names, "embedding": column})
    if writer is None:
        writer = parquet.ParquetWriter(path, table.schema, compression="zstd")
    writer.write_table(table)
    return writer
