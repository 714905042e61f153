"""The check for other users who could use a server that needs no key."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from batchwright.access.check import check_access, find_other_users
from batchwright.access.settings import ApiSettings
from batchwright.db.check import Level


def user(name: str, uid: int, home: Path | str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", str(home), "/bin/sh"))


def test_other_users_are_those_with_a_home_and_those_who_are_logged_in(tmp_path: Path) -> None:
    for name in ("ada", "me", "shop", "sessions"):
        (tmp_path / name).mkdir()
    (tmp_path / "sessions" / "33").mkdir()
    (tmp_path / "sessions" / "1001").mkdir()
    users = [
        user("me", 1001, tmp_path / "me"),
        user("gone", 1003, tmp_path / "gone"),
        user("ada", 1002, tmp_path / "ada"),
        user("shop", 999, tmp_path / "shop"),
        user("www-data", 33, "/var/www"),
        user("nobody", 65534, "/"),
        user("rootless", 1004, "/"),
    ]
    assert find_other_users(users, tmp_path / "sessions", 1001) == ["www-data", "ada"]
    assert find_other_users(users, tmp_path / "nowhere", 1002) == ["me"]
    assert find_other_users([], tmp_path / "sessions", 1001) == []
    assert isinstance(find_other_users(), list)


@pytest.mark.parametrize(
    ("settings", "has_key", "others", "level", "words"),
    [
        ({}, False, ["ada"], Level.WARNING, "open to every user of this machine, such as ada"),
        ({}, False, ["a", "b", "c", "d"], Level.WARNING, "such as a, b, c, …"),
        ({}, False, [], Level.OK, "without a key it is open to every user of this machine"),
        ({}, True, ["ada"], Level.OK, "it needs a key"),
        ({"socket": Path("/run/bw/api.sock")}, False, ["ada"], Level.OK, "only the server's user can connect"),
        ({"host": "10.0.0.1"}, False, [], Level.WARNING, "the server does not start"),
    ],
)
def test_a_server_without_a_key_is_a_warning_if_there_are_other_users(
    settings: dict[str, Path | str], has_key: bool, others: list[str], level: Level, words: str
) -> None:
    found = check_access(ApiSettings(**settings), has_key=has_key, others=others)
    assert (found.level, words in found.text) == (level, True), found
    if level is Level.WARNING:
        assert found.remedy is not None
        assert "batchwright key create NAME" in found.remedy
