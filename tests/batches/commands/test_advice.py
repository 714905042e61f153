"""Common mistakes in a server's address or key are named."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.batches.commands.advice import advise
from batchwright.batches.send.health import Complaint
from batchwright.inference.settings import GatewaySettings

URL = "http://ours:8000"


@pytest.mark.parametrize(
    ("complaint", "server", "words"),
    [
        ((None, 401, ""), {}, f"{URL} answers 401: it wants a key. "),
        ((None, 403, ""), {"api_key_env": "OURS"}, f"{URL} answers 403: it refuses the key of OURS"),
        ((None, 401, ""), {"headers": (("x-api-key", "a"),)}, f"{URL} answers 401: it refuses the key in the header"),
        ((None, 404, "Not Found"), {}, f"{URL} answers 404: --url is the address of the server, "),
        ((None, 404, "The model `small` does not exist."), {}, None),
        (("invalid_response", 200, "the server answered 200 with HTML, as a web site"), {}, f"{URL} answers with HTML"),
        (("redirect_refused", 301, "it answered 301, a redirect to https://x; more"), {}, "it answered 301, a red"),
        (("connection_failed", None, "the server could not be reached: connection refused"), {}, "nothing listens at "),
        (("connection_failed", None, "not reached: its name is unknown"), {}, f"{URL}: not reached: "),
        (("connection_lost", None, "the connection was lost: it does not speak plain HTTP"), {}, f"{URL}: the connec"),
        (("connection_lost", None, "the connection was lost"), {}, None),
        ((None, 500, "oops"), {}, None),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_to_do(
    complaint: tuple[str | None, int | None, str], server: dict[str, Any], words: str | None
) -> None:
    code, status, said = complaint
    found = advise([Complaint(code, status, 1, said)], GatewaySettings(url=URL, **server))
    assert (found or "").startswith(words or "")
    assert (found is None) is (words is None)
