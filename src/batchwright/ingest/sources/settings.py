"""Limits of a fetch, and where it may read from."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.ingest.limits import MEGABYTE
from batchwright.ingest.sources.patterns import Patterns
from batchwright.ingest.sources.roots import Roots, check_root


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Limits and rules of listing and fetching."""

    bytes_max: int = 100 * MEGABYTE
    """Maximum size of a document that is fetched."""
    documents_max: int = 1_000_000
    """Maximum number of documents in one listing; a longer one ends there and counts as incomplete."""
    exclude: tuple[str, ...] = ()
    """Patterns of names to leave out, such as `drafts/` or `*.tmp`; they override `include`."""
    follow_links: bool = False
    """Whether symbolic links in folders are followed; their targets must be under a root."""
    hidden: bool = False
    """Whether files and folders whose names begin with a dot are read."""
    include: tuple[str, ...] = ()
    """Patterns of names to read, whatever their extensions; empty, all supported formats."""
    private: bool = False
    """Whether URLs may lead to private addresses, such as those of a wiki in your own network."""
    redirects_max: int = 5
    """Maximum number of redirects of a URL."""
    roots: tuple[str, ...] = ()
    """Folders and bucket prefixes (`s3://bucket/prefix`) that callers over HTTP may name. They are read with the rights
    of this machine, so without roots such callers can name URLs only, even when they call from this machine."""
    seconds: float = 120.0
    """Time limit of fetching one document."""

    def __post_init__(self) -> None:
        for name in ("bytes_max", "documents_max", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"ingest.{name} is {getattr(self, name)}; it must be above 0")
        if self.redirects_max < 0:
            raise ConfigurationError(f"ingest.redirects_max is {self.redirects_max}; it must be at least 0")
        try:
            Patterns(self.include, self.exclude)
        except InvalidInput as error:
            raise ConfigurationError(f"ingest.include or ingest.exclude: {error}") from None
        for root in self.roots:
            check_root(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one listing."""

    patterns: Patterns
    roots: Roots
    settings: FetchSettings
