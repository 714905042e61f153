"""Style sheet, script and icon: part of the wheel, named by their contents, so browsers can cache them forever."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

from starlette.responses import Response

_FOLDER = "static"
_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_CACHED_FOREVER = "public, max-age=31536000, immutable"


class Asset(NamedTuple):
    """A file as it is served to browsers."""

    content: bytes
    media_type: str


class Assets:
    """The files of `static/`, by the name that includes their hash."""

    def __init__(self, package: str = "batchwright.web") -> None:
        self._by_name: dict[str, str] = {}
        self._files: dict[str, Asset] = {}
        for file in files(package).joinpath(_FOLDER).iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind in _KINDS:
                content = file.read_bytes()
                hashed = f"{stem}.{hashlib.sha256(content).hexdigest()[:16]}.{kind}"
                self._by_name[file.name] = hashed
                self._files[hashed] = Asset(content, _KINDS[kind])

    def url(self, name: str) -> str:
        return f"/ui/assets/{self._by_name[name]}"

    def answer(self, hashed: str) -> Response | None:
        """The file; None for an unknown or outdated name."""
        asset = self._files.get(hashed)
        if asset is None:
            return None
        return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": _CACHED_FOREVER})
