"""Azure OpenAI, with both forms of its paths."""

from tests.providers.conformance import VARIABLE, Case, chat_request


def settings(world):
    return {"base_url": world.server.urls["azure_openai"], "api_key_env": VARIABLE}


def settings_with_version(world):
    return {
        "base_url": f"{world.server.url}/azure_openai/openai",
        "api_key_env": VARIABLE,
        "api_version": "2025-03-01-preview",
    }


CASES = [
    Case(name="azure_openai", settings=settings, make_request=chat_request),
    Case(name="azure_openai", id="azure_openai_version", settings=settings_with_version, make_request=chat_request),
]
