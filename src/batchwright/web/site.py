"""The dashboard of one server process: templates, assets, menu and the data of open pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from batchwright.web import charts
from batchwright.web.assets import Assets
from batchwright.web.formats import FILTERS
from batchwright.web.limiter import Limiter
from batchwright.web.live import Live
from batchwright.web.settings import WebSettings

if TYPE_CHECKING:
    from batchwright.web.pages import Link, Pages, Panel

_LIVE = "live_"


class Site:
    """Everything that pages share."""

    def __init__(self, settings: WebSettings, pages: Sequence[Pages]) -> None:
        self.settings = settings
        self.assets = Assets()
        self.live = Live(settings.refresh_seconds)
        self.sign_ins = Limiter(settings.sign_ins_per_minute, seconds=60)
        self._pages = pages
        self._environment = self._make_environment()

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        return self._environment.get_template(template).render({"now": datetime.now(UTC), **context})

    def fragments(self, template: str, context: Mapping[str, Any]) -> dict[str, str]:
        """The regions of a page that update by themselves, each rendered separately."""
        found = self._environment.get_template(template)
        names = [name for name in found.blocks if name.startswith(_LIVE)]
        values = {"now": datetime.now(UTC), **context}
        return {name: "".join(found.blocks[name](found.new_context(values))) for name in names}

    def menu(self, may: Callable[[Any], bool], path: str) -> list[tuple[str, list[tuple[Link, bool]]]]:
        """The links that this visitor may follow, by group, and which of them is the current page."""
        from batchwright.web.pages import GROUPS

        links = [link for pages in self._pages for link in pages.links if may(link.scope)]
        within = [link for link in links if path == link.path or path.startswith(f"{link.path}/")]
        current = max(within, key=lambda link: len(link.path), default=None)
        groups: list[tuple[str, list[tuple[Link, bool]]]] = []
        for group in GROUPS:
            members = sorted((link for link in links if link.group == group), key=lambda link: (link.order, link.label))
            if members:
                groups.append((group, [(link, link is current) for link in members]))
        return groups

    def find(self, text: str) -> str | None:
        """Where the search field leads for this text, if it has the format of a known kind of id."""
        for finder in (finder for pages in self._pages for finder in pages.finders):
            if re.fullmatch(finder.pattern, text):
                return finder.path.format(quote(text, safe=""))
        return None

    @property
    def panels(self) -> list[Panel]:
        """The parts' panels on the overview."""
        return sorted((panel for pages in self._pages for panel in pages.panels), key=lambda panel: panel.order)

    def _make_environment(self) -> Environment:
        own = PackageLoader("batchwright.web", "templates")
        theirs = {pages.name: PackageLoader(pages.package, "templates") for pages in self._pages if pages.package}
        environment = Environment(
            loader=ChoiceLoader([own, PrefixLoader(theirs)]),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
            auto_reload=False,
        )
        environment.filters.update(FILTERS)
        environment.globals.update(
            asset=self.assets.url, charts=charts, csrf=_csrf, find=self.find, here=_here, may=_may, url=_url, zip=zip
        )
        environment.globals["ui"] = environment.get_template("macros.html").module
        return environment


@pass_context
def _csrf(context: Context) -> Markup:
    """The hidden fields that every form needs: one shows that it is from here, one that it was sent before."""
    return Markup('<input type="hidden" name="csrf" value="{}"><input type="hidden" name="once" value="{}">').format(
        context["csrf_token"], context["once"]
    )


@pass_context
def _url(context: Context, path: str, /, **query: Any) -> str:
    return str(context["visit"].url(path, **query))


@pass_context
def _here(context: Context, /, **changes: Any) -> str:
    return str(context["visit"].here(**changes))


@pass_context
def _may(context: Context, scope: str) -> bool:
    return bool(context["visit"].may(scope))
