"""Fixtures: the command line, for the demo."""

from tests.cli.conftest import cli, inside

__all__ = ["cli", "inside"]
