"""Common mistakes in the address or the key of a model server, named while nothing has been answered yet."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.batches.send.health import Complaint
from batchwright.inference.answers import Failure
from batchwright.inference.settings import GatewaySettings

_KEY_HEADERS = {"api-key", "authorization", "x-api-key"}


def advise(refusals: Sequence[Complaint], server: GatewaySettings) -> str | None:
    """What is probably wrong, by how every request failed so far; None if there is nothing to say."""
    return next((words for one in refusals if (words := _advise(one, server)) is not None), None)


def _advise(one: Complaint, server: GatewaySettings) -> str | None:
    if one.status in (401, 403):
        return _advise_on_key(server, one.status)
    if one.status in (404, 405) and "model" not in one.words.lower():
        return (
            f"{server.endpoint} answers {one.status}: --url is the address of the server, to which each request adds "
            "its own url, such as /v1/chat/completions. Are the port and the path right?"
        )
    if one.code == "invalid_response" and "HTML" in one.words:
        return f"{server.endpoint} answers with HTML: it is a web site or a proxy. Is it the address of a model server?"
    if one.code == "redirect_refused":
        return f"{one.words.partition(';')[0]}: write the address that it redirects to as --url"
    if one.code == Failure.CONNECT and "connection refused" in one.words:
        return f"nothing listens at {server.endpoint}: is the server started, and is the port right?"
    if one.code in (Failure.CONNECT, Failure.LOST) and ":" in one.words:
        return f"{server.endpoint}: {one.words}"
    return None


def _advise_on_key(server: GatewaySettings, status: int) -> str:
    named = [one for one in (server.api_key_env, server.api_key_file, server.api_key_name) if one is not None]
    if named:
        return f"{server.endpoint} answers {status}: it refuses the key of {named[0]}"
    if _KEY_HEADERS & {name for name, _ in server.headers}:
        return f"{server.endpoint} answers {status}: it refuses the key in the header"
    return (
        f"{server.endpoint} answers {status}: it wants a key. Put the key into an environment variable, and name that: "
        "--api-key-env NAME"
    )
