"""Fixtures: the HTTP server, for the routes of files."""

from tests.api.conftest import api, http

__all__ = ["api", "http"]
