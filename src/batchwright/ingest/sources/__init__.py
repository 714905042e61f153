"""Where documents come from: list folders, URLs and object stores, and fetch documents one at a time.

Importing this is cheap: the first fetch that needs a client for HTTP or for object stores loads it.

>>> sources = Sources(FetchSettings())
>>> listing = sources.list(["./papers"], roots=local_roots(["./papers"]))
>>> async for listed in listing:
...     fetched = await sources.fetch(listed.uri, folder / "document", roots=local_roots(["./papers"]))
>>> listing.is_complete
True
"""

from __future__ import annotations

from batchwright.ingest.sources.listing import Listed, Listing, Reason, Skipped
from batchwright.ingest.sources.parse import FileSource, ObjectSource, Source, UrlList, UrlSource, parse_source
from batchwright.ingest.sources.roots import local_roots
from batchwright.ingest.sources.service import Sources
from batchwright.ingest.sources.settings import FetchSettings
from batchwright.ingest.sources.sink import Fetched, NotModified

__all__ = [
    "FetchSettings",
    "Fetched",
    "FileSource",
    "Listed",
    "Listing",
    "NotModified",
    "ObjectSource",
    "Reason",
    "Skipped",
    "Source",
    "Sources",
    "UrlList",
    "UrlSource",
    "local_roots",
    "parse_source",
]
