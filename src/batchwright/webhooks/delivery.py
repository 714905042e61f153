"""Notify endpoints that a batch or a task has ended: one signed event, delivered to each endpoint by its own job.

The commit that ends an object also enqueues its deliveries, so no event is lost, and none reports an end that did not
happen. From then on a delivery is a job like any other: it survives its worker, is retried for about a day, and then
waits in the inbox for a person to rerun it. A worker may die between the answer and the commit, so an endpoint can
receive an event twice, with the same `webhook-id`.

    2xx                         delivered, whatever the body says
    410                         fails at once: the endpoint wants no more events
    429, 503 with Retry-After   waits as requested and uses no attempt, while the event is younger than a day
    anything else, even 3xx     a failed attempt; redirects are never followed
    no answer in time           a failed attempt

Events and signatures are those of OpenAI and of Standard Webhooks, so that their clients can check them.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import Field

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.errors import ConfigurationError, Fatal, RateLimited, Transient
from batchwright.inference.answers import Answer
from batchwright.inference.gateway import Gateway, Key, Request, network_thread
from batchwright.inference.settings import SECRETS, GatewaySettings, InferenceSettings
from batchwright.operations.decorator import operation
from batchwright.webhooks.part import DELIVER, QUEUE
from batchwright.webhooks.settings import (
    EVENT_TYPES,
    SECRET_PREFIX,
    TIMEOUT_SECONDS_MAX,
    EventType,
    WebhookSettings,
    refuse_doubles,
)

PATIENCE_SECONDS = 86_400.0
_RETRY_AFTER_SECONDS_MIN = 5.0
_LIMITS = InferenceSettings(response_bytes_max=64 * 1024)
_KEY_BYTES = range(24, 65)
_SECRETS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The end of an object. It ends once, so its id and the type determine the event's id."""

    id: Annotated[str, Field(pattern=r"^evt_[0-9a-f]{32}$")]
    """It is signed together with the time and the body, separated by dots, so it must not contain a dot."""
    type: EventType
    batch_id: str
    """The id of the batch or the task; it keeps this name because older deliveries may still be queued."""
    created_at: int

    @classmethod
    def of(cls, object_id: str, type: EventType, ended_at: datetime) -> Event:
        assert type in EVENT_TYPES, f"{type!r} is not the end of an object"
        digest = hashlib.sha256(f"{object_id} {type}".encode()).hexdigest()
        return cls(id=f"evt_{digest[:32]}", type=type, batch_id=object_id, created_at=int(ended_at.timestamp()))

    def body(self) -> bytes:
        """The same bytes at every attempt."""
        document = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.type,
            "data": {"id": self.batch_id},
        }
        return orjson.dumps(document)


@operation(
    DELIVER,
    queue=QUEUE,
    max_attempts=34,
    timeout_seconds=TIMEOUT_SECONDS_MAX + 30.0,
    backoff_seconds=10.0,
    backoff_seconds_max=7200.0,
)
async def deliver_webhook(ctx: Context, endpoint: str, event: Event) -> dict[str, int]:
    """Post one event to one endpoint of the job's tenant."""
    return {"status": await ctx.service(Webhooks).deliver(ctx.tenant, endpoint, event)}


def deliveries(
    endpoints: Sequence[WebhookSettings], tenant: str, object_id: str, event_type: EventType, now: datetime
) -> list[NewJob]:
    """One job for each subscribed endpoint. No secret is needed here, because any worker may end a batch or a task."""
    event = Event.of(object_id, event_type, now)
    return [
        NewJob(deliver_webhook, {"endpoint": endpoint.name, "event": event}, tenant=tenant)
        for endpoint in endpoints
        if event_type in endpoint.events
    ]


class Webhooks:
    """The endpoints of all tenants, and how to deliver to them."""

    def __init__(
        self,
        settings: Mapping[str, Sequence[WebhookSettings]],
        *,
        environment: Mapping[str, str] | None = None,
        secrets: Path = SECRETS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        refuse_doubles(settings)
        variables = os.environ if environment is None else environment
        make = _maker(variables, secrets)
        self._endpoints = {tenant: {one.name: make(one) for one in endpoints} for tenant, endpoints in settings.items()}
        self._clock = clock

    def __repr__(self) -> str:
        return f"Webhooks({ {tenant: list(endpoints) for tenant, endpoints in self._endpoints.items()} })"

    async def deliver(self, tenant: str, endpoint: str, event: Event) -> int:
        """One attempt: the status of success, or the error that decides what follows.

        An endpoint that is not known here may be known to the next worker, while a new configuration is rolled out.
        """
        found = self._endpoints.get(tenant, {}).get(endpoint)
        if found is None:
            raise Transient(
                f"no webhook {endpoint} is configured for the tenant {tenant!r}: its url was changed or removed, or "
                "this worker does not have the new configuration yet",
                code="endpoint_unknown",
            )
        now = self._clock()
        try:
            answer = await found.post(event, int(now))
        except ConfigurationError as error:
            raise Transient(str(error), code="secret_invalid") from None
        return _judge(answer, endpoint, is_young=now - event.created_at < PATIENCE_SECONDS)

    async def close(self) -> None:
        for endpoints in self._endpoints.values():
            for endpoint in endpoints.values():
                await endpoint.gateway.close()


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An endpoint with its secret, which is used for signatures and nothing else."""

    settings: WebhookSettings
    gateway: Gateway
    secret: Key

    async def post(self, event: Event, timestamp: int) -> Answer:
        body = event.body()
        headers = {
            "webhook-id": event.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(self.keys(), event.id, timestamp, body),
        }
        return await self.gateway.send(Request(url=self.settings.path, body=body, id=event.id, headers=headers))

    def keys(self) -> list[bytes]:
        text = self.secret.text(time.monotonic())
        keys = [_decode(secret) for secret in (text or "").split(",")]
        good = [key for key in keys if key is not None]
        if len(good) != len(keys) or len(good) > _SECRETS_MAX:
            raise ConfigurationError(
                f"the secret of the webhook {self.settings.name} is {self.secret.origin}, which is not "
                f"{SECRET_PREFIX} and 24 to 64 bytes in base64; create one with `openssl rand -base64 32`"
            )
        return good


def sign(keys: Sequence[bytes], id: str, timestamp: int, body: bytes) -> str:
    """A signature with each key, so that a secret can be replaced while both are in use."""
    signed = f"{id}.{timestamp}.".encode() + body
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _maker(variables: Mapping[str, str], secrets: Path) -> Callable[[WebhookSettings], _Endpoint]:
    """All endpoints share one network thread; an invalid secret is refused here, at start."""
    thread = functools.cache(network_thread)

    def make(settings: WebhookSettings) -> _Endpoint:
        name = settings.secret_name
        file = secrets / name if name is not None else settings.secret_file
        key = Key(f"the secret of the webhook {settings.name}", file, settings.secret_env, variables)
        server = GatewaySettings(url=settings.origin, request_timeout=settings.timeout_seconds)
        endpoint = _Endpoint(settings, Gateway(server, _LIMITS, environment={}, runtime=thread()), key)
        endpoint.keys()
        return endpoint

    return make


def _decode(secret: str) -> bytes | None:
    if not secret.startswith(SECRET_PREFIX):
        return None
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        return None
    return key if len(key) in _KEY_BYTES else None


def _judge(answer: Answer, endpoint: str, *, is_young: bool) -> int:
    """Only the status counts: a receiver that answered 2xx has the event, even if its body is cut short."""
    status = answer.status
    if status is None:
        raise Transient(f"the webhook {endpoint} was not delivered: {answer.message}", code=answer.code)
    if 200 <= status < 300:
        return status
    reason = f"the webhook {endpoint} was answered with {status}"
    if status == 410:
        raise Fatal(f"{reason}: it wants no more events, so remove it from the configuration", code="endpoint_gone")
    if 300 <= status < 400:
        raise Transient(f"{reason}; redirects are not followed, correct its url", code="redirect_refused")
    if status in (429, 503) and answer.retry_after is not None and is_young:
        raise RateLimited(reason, retry_after=max(answer.retry_after, _RETRY_AFTER_SECONDS_MIN))
    raise Transient(reason, code=f"http_{status}")
