"""OpenAI, and other services with its protocol."""

from tests.providers.conformance import VARIABLE, Case, chat_request


def settings(name):
    return lambda world: {"base_url": world.server.urls[name], "api_key_env": VARIABLE}


CASES = [
    Case(name="openai", settings=settings("openai"), make_request=chat_request),
    Case(name="groq", settings=settings("groq"), make_request=chat_request),
    Case(name="together", settings=settings("together"), make_request=chat_request),
]
