"""The database's password is not in the process list, neither for a command that got it nor for its children."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from batchwright.cli.process_list import overwrite_argument
from tests.cli.conftest import Cli, Inside

PASSWORD = "hunter2hunter2"
OPERATIONS = """
import time
from batchwright import operation

@operation("spin", cpu=True)
def spin(ctx):
    ctx.emit("spin.began")
    time.sleep(60)
"""


def command_lines(pid: int) -> list[str]:
    """The command lines of a process and of its descendants."""
    process = psutil.Process(pid)
    found = [process, *process.children(recursive=True)]
    return [Path(f"/proc/{one.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for one in found]


def test_no_process_has_the_password_in_its_command_line(cli: Cli, tmp_path: Path) -> None:
    """The server trusts all clients of its socket, so it accepts any password."""
    (tmp_path / "spinning.py").write_text(OPERATIONS)
    url = make_conninfo(cli.url, password=PASSWORD)
    del cli.environment["BATCHWRIGHT_DATABASE_URL"]
    with cli.start("up", "spinning.py", "--no-api", "--database-url", url) as up:
        up.until("warning: --database-url has a password.* BATCHWRIGHT_DATABASE_URL instead.* PGPASSFILE")
        up.until("worker .* runs .*spin")
        cli.environment["BATCHWRIGHT_DATABASE_URL"] = cli.url
        id = cli.json("job", "submit", "spin")["id"]
        cli.begun(id, "spin.began")
        lines = command_lines(up.pid)
        assert len(lines) >= 3, "these are the command, its worker, and the process of the operation"
        assert [line for line in lines if PASSWORD in line] == []
        assert "up spinning.py --no-api --database-url postgresql://" in lines[0]
        assert PASSWORD not in up.said


def test_a_url_without_a_password_is_left_alone(inside: Inside, database_url: str) -> None:
    assert "warning" not in inside("job", "list", "--database-url", database_url)[2]
    assert not overwrite_argument("postgresql://nobody-wrote-this", "")


def test_a_service_file_of_libpq_can_hold_the_password(
    inside: Inside, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "\n".join(f"{name}={value}" for name, value in conninfo_to_dict(database_url).items())
    (tmp_path / "services").write_text(f"[bw]\n{settings}\npassword={PASSWORD}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", "service=bw")
    assert inside.json("job", "list") == []
