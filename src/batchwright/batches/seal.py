"""Encrypts the headers of a batch's creator while the batch runs: AES-256-GCM, bound to the batch's family.

    1 byte version · 12 bytes nonce · ciphertext and tag

The key is 32 bytes in base64, one line of a file or an environment variable. A file may have several lines: the first
encrypts and all decrypt, so that a key can be replaced while batches run. With the embedded database a key is created
in its folder, beside the data.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import orjson

from batchwright.batches.store import NewBatch
from batchwright.errors import ConfigurationError

KEY_FILE = "headers.key"
_VERSION = b"\x01"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_FILE_BYTES_MAX = 4096


class KeySource(NamedTuple):
    """Where the key is; `made` is a file that gets a new key if it does not exist."""

    file: Path | None = None
    variable: str | None = None
    made: Path | None = None


class Seal:
    """Encrypts and decrypts the headers of batches. Keys are read when they are needed, and never shown."""

    def __init__(self, source: KeySource, environment: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._environment = os.environ if environment is None else environment

    def __repr__(self) -> str:
        return "Seal()"

    def close(self, headers: Mapping[str, str], family: str) -> bytes:
        """Encrypt. ConfigurationError if there is no key: headers are never stored in plain text, and never dropped."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # here: it takes 30 ms, and few need it

        key = self._keys()[0]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + AESGCM(key).encrypt(nonce, orjson.dumps(dict(headers)), family.encode())

    def open(self, sealed: bytes, family: str) -> dict[str, str]:
        """Decrypt. ConfigurationError if none of the keys fits."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        keys = self._keys()
        start = len(_VERSION) + _NONCE_BYTES
        for key in keys if sealed[:1] == _VERSION else ():
            with contextlib.suppress(InvalidTag):
                clear = AESGCM(key).decrypt(sealed[1:start], sealed[start:], family.encode())
                headers: dict[str, str] = orjson.loads(clear)
                return headers
        raise ConfigurationError(
            f"the headers of its creator cannot be decrypted: {self._origin} holds another key than the one that "
            "encrypted them; add that key in a line of its own"
        )

    def fingerprint(self, headers: Mapping[str, str]) -> str:
        """The same for equal headers; without the key, headers cannot be guessed from it."""
        text = orjson.dumps(dict(headers), option=orjson.OPT_SORT_KEYS)
        return hmac.new(self._keys()[0], text, hashlib.sha256).hexdigest()

    def check(self) -> None:
        """ConfigurationError if there is no key, and none is created automatically."""
        if self._source.made is None:
            self._keys()

    @property
    def _origin(self) -> str:
        file, variable, made = self._source
        return f"the environment variable {variable}" if variable is not None else f"the file {file or made}"

    def _keys(self) -> list[bytes]:
        file, variable, made = self._source
        if file is None and variable is None and made is None:
            raise ConfigurationError(
                "headers of a batch's creator are stored encrypted, and there is no key for that; write one by "
                "`openssl rand -base64 32 > headers.key`, and name that file by batches.header_key_file for all "
                "workers and API servers"
            )
        if made is not None and not made.exists():
            _make(made)
        try:
            text = self._environment[variable] if variable is not None else _read(file or made)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"the key for headers is {self._origin}, which cannot be read: {type(error).__name__}"
            ) from None
        keys = [_decode(line) for line in text.split()]
        good = [key for key in keys if key is not None]
        if not good or len(good) < len(keys):
            raise ConfigurationError(
                f"the key for headers is {self._origin}, which does not hold 32 bytes in base64; make one by "
                "`openssl rand -base64 32`"
            )
        return good


@dataclass(frozen=True, slots=True)
class CreatorHeaders:
    """Headers of a batch's creator that go to the model server, and the seal for them."""

    seal: Seal
    headers: Mapping[str, str] = field(repr=False)

    @property
    def digest(self) -> dict[str, str]:
        """What an idempotency key identifies in addition to the body."""
        return {"passed_on": self.seal.fingerprint(self.headers)} if self.headers else {}

    def check(self) -> None:
        """ConfigurationError if they cannot be encrypted."""
        if self.headers:
            self.seal.fingerprint(self.headers)

    def seal_into(self, new: NewBatch) -> NewBatch:
        if not self.headers:
            return new
        return replace(new, sealed_headers=self.seal.close(self.headers, new.family or new.id))


def _read(file: Path | None) -> str:
    assert file is not None
    with file.open(encoding="ascii") as opened:
        return opened.read(_FILE_BYTES_MAX)


def _decode(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == _KEY_BYTES else None


def _make(file: Path) -> None:
    """Create a key, and sync it before anything is encrypted with it. If several processes do, the first one wins."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as target:
            target.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n")
            target.flush()
            os.fsync(target.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
