"""The dashboard as a part: the engine's pages, and the services for the pages of all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.part import BodyLimit, Part, Served, Server

if TYPE_CHECKING:
    from batchwright.web.settings import WebSettings

_SIGN_IN_BYTES_MAX = 16 * 1024
"""A small limit, because it applies before a key is checked."""
_VIEWS = "batchwright.web.views"


class WebPart(Part):
    """The dashboard at /ui."""

    name = "web"
    tables = {"web": "batchwright.web.settings:WebSettings"}
    pages = (
        f"{_VIEWS}.access:pages",
        f"{_VIEWS}.overview:pages",
        f"{_VIEWS}.jobs:pages",
        f"{_VIEWS}.job:pages",
        f"{_VIEWS}.inbox:pages",
        f"{_VIEWS}.queues:pages",
        f"{_VIEWS}.workers:pages",
        f"{_VIEWS}.operations:pages",
        f"{_VIEWS}.schedules:pages",
        f"{_VIEWS}.keys:pages",
    )

    @property
    def settings(self) -> WebSettings:
        from batchwright.web.settings import WebSettings

        return self.core.settings.table("web", WebSettings)

    def serve(self, server: Server) -> Served:
        from batchwright.plugins import load
        from batchwright.web.pages import Pages
        from batchwright.web.site import Site
        from batchwright.web.views.access import fallbacks

        loaded = [load(place) for part in self.core.parts for place in part.pages]
        site = Site(self.settings, [pages for pages in loaded if isinstance(pages, Pages)])
        too_large = f"a sign-in has at most {_SIGN_IN_BYTES_MAX} bytes"
        return Served(
            services=site,
            body_limits=(BodyLimit("POST", "/ui/sign-in", _SIGN_IN_BYTES_MAX, too_large, "key"),),
            fallbacks=fallbacks,
            end_streams=site.live.close,
        )
