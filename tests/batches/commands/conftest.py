"""Fixtures: the command line, for the commands of batches."""

from tests.cli.conftest import cli, inside

__all__ = ["cli", "inside"]
