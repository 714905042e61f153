"""Vertex AI, with the server's buckets."""

from tests.providers.conformance import VARIABLE, Case, chat_request


def settings(world):
    return {
        "base_url": world.server.urls["vertex"],
        "access_token_env": VARIABLE,
        "project": "my-project",
        "bucket": "gs://my-bucket/batches",
    }


CASES = [
    Case(
        name="vertex",
        settings=settings,
        make_request=chat_request,
        unsupported={"an_error_while_results": "buckets are read with retries of their own"},
    )
]
