"""Which tables `compute_embeddings` may read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchwright.errors import ConfigurationError

_TABLE = re.compile(r"[^.\s]+\.(?:[^.\s]+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings:
    """The operation `compute_embeddings`."""

    tables: tuple[str, ...] = ()
    """Tables of the database that jobs may embed, such as "public.articles" or "shop.*". Batchwright's own role reads
    them, so everybody who may submit jobs, in any tenant, can read these tables."""

    def __post_init__(self) -> None:
        for name in self.tables:
            if not _TABLE.fullmatch(name):
                raise ConfigurationError(f'embeddings.tables has {name!r}; write "schema.table", or "schema.*" for all')

    def allows(self, schema: str, table: str) -> bool:
        """Whether jobs may embed this table; never one of Batchwright or of the server."""
        return not is_internal(schema) and (f"{schema}.{table}" in self.tables or f"{schema}.*" in self.tables)


def is_internal(schema: str) -> bool:
    """Whether a schema belongs to Batchwright or to the server."""
    return schema in ("batchwright", "information_schema") or schema.startswith("pg_")
