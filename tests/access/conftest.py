"""Fixtures: the HTTP server behind the gate."""

from tests.api.conftest import api

__all__ = ["api"]
