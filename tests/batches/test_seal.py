"""Encrypted headers of creators: keys, their rotation, and what cannot be decrypted."""

from __future__ import annotations

import base64
import secrets
import stat
import threading
from pathlib import Path

import pytest

from batchwright.batches.seal import KeySource, Seal
from batchwright.errors import ConfigurationError

HEADERS = {"x-team": "search", "x-priority": "low"}


def key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def test_headers_can_be_decrypted_and_equal_ones_have_different_ciphertexts(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(key() + "\n")
    seal = Seal(KeySource(file=tmp_path / "key"))
    one, two = seal.close(HEADERS, "batch_1"), seal.close(HEADERS, "batch_1")
    assert seal.open(one, "batch_1") == seal.open(two, "batch_1") == HEADERS
    assert one != two
    assert b"search" not in one
    assert b"x-team" not in one
    assert seal.fingerprint(HEADERS) == seal.fingerprint(dict(reversed(HEADERS.items())))
    assert seal.fingerprint(HEADERS) != seal.fingerprint({**HEADERS, "x-team": "ads"})
    assert (tmp_path / "key").read_text().strip() not in repr(seal)


def test_a_ciphertext_that_was_changed_or_belongs_to_another_batch_is_refused(tmp_path: Path) -> None:
    seal = Seal(KeySource(variable="KEY"), {"KEY": key()})
    sealed = seal.close(HEADERS, "batch_1")
    for broken, family in [(sealed, "batch_2"), (sealed[:-1] + bytes([sealed[-1] ^ 1]), "batch_1"), (b"", "batch_1")]:
        with pytest.raises(ConfigurationError, match="the environment variable KEY holds another key"):
            seal.open(broken, family)


def test_a_key_is_rotated_by_adding_the_new_one_above_the_old_one(tmp_path: Path) -> None:
    old, new, file = key(), key(), tmp_path / "key"
    file.write_text(old)
    seal = Seal(KeySource(file=file))
    sealed = seal.close(HEADERS, "b")
    file.write_text(f"{new}\n{old}\n")
    assert seal.open(sealed, "b") == HEADERS
    newer = seal.close(HEADERS, "b")
    file.write_text(new)
    assert seal.open(newer, "b") == HEADERS
    with pytest.raises(ConfigurationError, match="holds another key"):
        seal.open(sealed, "b")


@pytest.mark.parametrize(
    "content",
    ["", "secret", key()[:-4], f"{key()} nonsense", "ü"],
    ids=["empty", "no base64", "too short", "two words", "no ASCII"],
)
def test_a_file_without_a_good_key_is_named_and_its_content_is_not(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigurationError, match=f"the key for headers is the file {tmp_path}/key, which ") as raised:
        Seal(KeySource(file=tmp_path / "key")).close(HEADERS, "b")
    assert "secret" not in str(raised.value)
    assert "nonsense" not in str(raised.value)


def test_without_a_key_nothing_is_encrypted_and_the_remedy_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"name that file by batches\.header_key_file for all workers"):
        Seal(KeySource()).close(HEADERS, "b")
    with pytest.raises(ConfigurationError, match="environment variable KEY, which cannot be read: KeyError"):
        Seal(KeySource(variable="KEY"), {}).close(HEADERS, "b")


def test_processes_that_create_the_key_at_the_same_time_use_the_same_one(tmp_path: Path) -> None:
    file, sealed, barrier = tmp_path / "headers.key", list[bytes](), threading.Barrier(8)

    def close() -> None:
        barrier.wait(30)
        sealed.append(Seal(KeySource(made=file)).close(HEADERS, "b"))

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [Seal(KeySource(made=file)).open(one, "b") for one in sealed] == [HEADERS] * 8
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["headers.key"]
