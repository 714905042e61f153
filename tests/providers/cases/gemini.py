"""Gemini."""

from tests.providers.conformance import VARIABLE, Case, chat_request


def settings(world):
    return {"base_url": world.server.urls["gemini"], "api_key_env": VARIABLE}


CASES = [Case(name="gemini", settings=settings, make_request=chat_request)]
