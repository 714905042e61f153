"""`windlass demo` as `make demo` runs it, only smaller."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cli.conftest import Cli


def test_the_demo_loses_nothing_and_touches_no_database_of_the_users(cli: Cli) -> None:
    said = cli("demo", "--children", "30").stdout
    assert "with SIGKILL while it held" in said
    assert "its lease ran out: its jobs were taken back" in said
    assert "30 of 30" in said
    assert "30, 30 distinct" in said
    assert "nothing was lost or done twice" in said
    assert cli.rows("SELECT count(*) FROM windlass.job") == [(0,)]
    (folder,) = [line.rsplit(" ", 1)[-1] for line in said.splitlines() if "starting a PostgreSQL" in line]
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert not Path(folder).exists()
