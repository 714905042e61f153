"""Signed URLs of objects in buckets, for providers that fetch their inputs themselves. They are never stored."""

from __future__ import annotations

from datetime import timedelta

import obstore
from obstore import exceptions as refused
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from batchwright.errors import Fatal
from batchwright.providers.buckets import address_of, split_uri


async def sign_uri(uri: str, seconds: float) -> str:
    """A URL from which anybody can read this object for a while; the bucket's credentials come from the environment."""
    root, key = split_uri(uri)
    try:
        store = from_url(address_of(root))
        if isinstance(store, (S3Store, GCSStore, AzureStore)):
            return await obstore.sign_async(store, "GET", key, timedelta(seconds=seconds))
    except (refused.BaseError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        message = f"no URL can be signed for an object in {root}: {reason}; pass an https URL instead"
        raise Fatal(message, scope="credential", code="cannot_sign") from None
    raise Fatal(f"no URL can be signed for an object in {root}; pass an https URL", scope="item", code="cannot_sign")
