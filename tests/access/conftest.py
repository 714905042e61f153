"""Fixtures: the HTTP server that the gate stands before."""

from tests.api.conftest import api

__all__ = ["api"]
