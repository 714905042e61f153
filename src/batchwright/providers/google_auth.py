"""Access tokens for Google's services: given by reference, or obtained with the signature of a service account."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from batchwright.errors import ConfigurationError, Fatal, Transient
from batchwright.inference.http import Response
from batchwright.providers.tools import AdapterTools

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_SECONDS = 3600
_SPARE_SECONDS = 300.0
"""A token is replaced this long before it expires."""
_FILE_BYTES_MAX = 64 * 1024
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleCredentials:
    """Where the credentials are; by default in the service account file that GOOGLE_APPLICATION_CREDENTIALS names."""

    access_token_env: str | None = None
    access_token_file: Path | None = None
    service_account_file: Path | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"set only one of {' and '.join(given)}")


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    expires_at: float
    origin: object


class GoogleTokens:
    """The token of one account, kept until shortly before it expires."""

    def __init__(self, credentials: GoogleCredentials, tools: AdapterTools) -> None:
        self._tools = tools
        self._account = credentials.service_account_file
        self._secret = None
        if credentials.access_token_env is not None or credentials.access_token_file is not None:
            self._secret = tools.secret(
                "the access token", file=credentials.access_token_file, variable=credentials.access_token_env
            )
        elif self._account is None and (named := tools.environment.get(CREDENTIALS)):
            self._account = Path(named)
        self._kept: _Token | None = None
        self._lock = asyncio.Lock()

    @property
    def missing(self) -> str | None:
        """What is missing, as text; None if nothing is missing."""
        if self._secret is not None:
            return self._secret.missing
        if self._account is None:
            return f"the environment variable {CREDENTIALS} does not name a service account file"
        return None if self._account.is_file() else f"there is no service account file {self._account}"

    async def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {await self.text()}"}

    async def text(self) -> str:
        if self._secret is not None:
            return self._secret.text()
        if (missing := self.missing) is not None:
            raise Fatal(missing, scope="credential", code="credentials_missing")
        async with self._lock:
            assert self._account is not None
            # A replaced file invalidates the old token.
            changed_at = self._account.stat().st_mtime_ns
            kept = self._kept
            if kept is None or kept.origin != changed_at or time.monotonic() >= kept.expires_at:
                kept = self._kept = await self._exchange(_read_account(self._account), changed_at)
            return kept.text

    async def _exchange(self, account: _Account, origin: object) -> _Token:
        signed = sign_assertion(account.email, account.key, account.key_id, account.token_uri, self._now())
        response = await self._tools.http.ask(
            "POST",
            account.token_uri,
            headers={"content-type": "application/x-www-form-urlencoded"},
            body=urlencode({"grant_type": _GRANT, "assertion": signed}).encode(),
        )
        answer = _answer(response)
        seconds = max(0.0, float(answer.get("expires_in", 0)) - _SPARE_SECONDS)
        return _Token(answer["access_token"], time.monotonic() + seconds, origin)

    def _now(self) -> int:
        return int(self._tools.now().timestamp())


def sign_assertion(email: str, key: rsa.RSAPrivateKey, key_id: str | None, audience: str, now: int) -> str:
    """The signed statement of a service account that Google exchanges for a token."""
    header = {"alg": "RS256", "typ": "JWT"} | ({"kid": key_id} if key_id else {})
    claims = {"iss": email, "scope": SCOPE, "aud": audience, "iat": now, "exp": now + _SECONDS}
    unsigned = f"{_encoded(orjson.dumps(header))}.{_encoded(orjson.dumps(claims))}"
    signature = key.sign(unsigned.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{unsigned}.{_encoded(signature)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    email: str
    key: rsa.RSAPrivateKey = field(repr=False)
    key_id: str | None
    token_uri: str


def _read_account(file: Path) -> _Account:
    """The account in a key file; errors name the file but none of its content."""
    try:
        with file.open("rb") as opened:
            said = orjson.loads(opened.read(_FILE_BYTES_MAX))
        key = serialization.load_pem_private_key(said["private_key"].encode(), password=None)
        account = _Account(
            email=said["client_email"], key=_rsa(key), key_id=said.get("private_key_id"), token_uri=said["token_uri"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{file} cannot be read as the key file of a service account: {type(error).__name__}"
        raise Fatal(message, scope="credential", code="credentials_missing") from None
    parts = urlsplit(account.token_uri)
    if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
        raise Fatal(f"the token_uri in {file} is not https", scope="credential", code="credentials_missing")
    return account


def _rsa(key: object) -> rsa.RSAPrivateKey:
    if not isinstance(key, rsa.RSAPrivateKey):
        raise TypeError("not an RSA key")
    return key


def _answer(response: Response) -> dict[str, Any]:
    if response.status == 429 or response.status >= 500:
        raise Transient(f"Google's token service answered {response.status}", code="token_unavailable")
    if not response.is_ok:
        raise Fatal(
            f"Google refuses the service account ({response.status}{_said(response)})",
            scope="credential",
            code="credentials_refused",
        )
    answer = response.json()
    if not isinstance(answer, dict) or not isinstance(answer.get("access_token"), str):
        raise Transient("Google's token service answered without a token", code="token_unavailable")
    return answer


def _said(response: Response) -> str:
    """OAuth's error code, such as invalid_grant."""
    try:
        return f": {str(orjson.loads(response.body)['error'])[:100]}"
    except (ValueError, KeyError, TypeError):
        return ""


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
