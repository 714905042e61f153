"""The contract server: it speaks every provider's protocol on one port, and serves signed URLs on another."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.simulator.answers import error_body
from batchwright.simulator.faults import Fault as Break
from batchwright.simulator.http import Connection, Exchange
from batchwright.simulator.providers.anthropic import Anthropic
from batchwright.simulator.providers.aws import S3, Aws
from batchwright.simulator.providers.azure import AzureSpeech
from batchwright.simulator.providers.faults import Fault, Faults
from batchwright.simulator.providers.gcs import Gcs
from batchwright.simulator.providers.gemini import Gemini
from batchwright.simulator.providers.google_speech import GoogleSpeech
from batchwright.simulator.providers.jobs import Clock, Job
from batchwright.simulator.providers.mistral import Mistral
from batchwright.simulator.providers.openai import AzureOpenAI, Groq, OpenAI, Together
from batchwright.simulator.providers.sarvam import Sarvam
from batchwright.simulator.providers.vertex import Vertex
from batchwright.simulator.providers.wire import OCTETS, XML, Answer, Call, Refused, Wire, answer
from batchwright.simulator.providers.world import REFUSED_KEY, Handler, Protocol, ProviderSettings, World

PROTOCOLS: Sequence[type[Protocol]] = (
    Anthropic, Aws, AzureOpenAI, AzureSpeech, Gcs, Gemini, GoogleSpeech, Groq, Mistral, OpenAI, S3, Sarvam, Together,
    Vertex,
)  # fmt: skip
CREDENTIALS = (
    "api-key", "api-subscription-key", "authorization", "ocp-apim-subscription-key", "x-amz-security-token",
    "x-api-key", "x-goog-api-key",
)  # fmt: skip
"""Headers that carry credentials."""
_BODY_KEPT = 1 << 13
_BODY_MATCHED = 1 << 16
_HANG_SECONDS = 3600.0
_SEEN_MAX = 50_000
_SIGNED = "signed"


@dataclass(slots=True)
class Seen:
    """A received request, and its outcome."""

    at: float
    port: str
    """`api`, or `signed` for the one that serves signed URLs."""
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    """Its beginning."""
    route: str = ""
    status: int | None = None
    """The status of the answer; 0 if the connection was cut, None if there is no answer yet."""
    fault: str | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("at", "port", "method", "path", "query", "headers", "route", "status", "fault")
        return {**{name: getattr(self, name) for name in names}, "body": self.body.decode("utf-8", "replace")}


class Server:
    """Every provider, in this event loop."""

    def __init__(self, settings: ProviderSettings | None = None) -> None:
        self.settings = settings or ProviderSettings()
        self.clock = Clock(self.settings.start, self.settings.speed)
        self.faults = Faults(self.settings.faults)
        self.world = World(self.settings, self.clock, self.faults)
        self.seen: deque[Seen] = deque(maxlen=_SEEN_MAX)
        self._doors = {name: Door(self, name) for name in ("api", _SIGNED)}
        self._protocols = {one.name: one(self.world) for one in PROTOCOLS}

    @property
    def url(self) -> str:
        return self.world.url

    @property
    def signed_url(self) -> str:
        return self.world.signed_url

    @property
    def urls(self) -> dict[str, str]:
        """The base URL of each provider, for the configuration of a client."""
        return {name: f"{self.url}/{name}{one.base}" for name, one in self._protocols.items()}

    async def open(self, host: str = "127.0.0.1", port: int = 0, signed_port: int = 0) -> Server:
        """Listen on two ports; 0 takes a free one. `url` and `signed_url` say where."""
        self.world.url = await self._doors["api"].open(host, port)
        self.world.signed_url = await self._doors[_SIGNED].open(host, signed_port)
        return self

    async def close(self) -> None:
        """Cut every connection."""
        for door in self._doors.values():
            door.close()
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Advance the server's clock."""
        self.clock.advance(seconds)
        self.world.publish()

    def put_faults(self, *rules: str | Fault) -> None:
        """Replace the rules."""
        self.faults.put(rules)

    def jobs(self, marker: str | None = None, provider: str | None = None) -> list[Job]:
        """Started remote jobs, oldest first; with a marker, only those whose request contained it."""
        return [
            one
            for one in self.world.jobs.values()
            if (marker is None or marker in one.trace)
            and (provider is None or provider == one.provider)
            and one.begun_at is not None
        ]

    def requests(self, route: str | None = None, port: str | None = None) -> list[Seen]:
        """Received requests, oldest first."""
        return [
            one for one in self.seen if (route is None or one.route == route) and (port is None or one.port == port)
        ]

    @property
    def leaks(self) -> list[Seen]:
        """Requests that sent a credential to the port of signed URLs, where none belongs."""
        return [one for one in self.requests(port=_SIGNED) if not one.headers.keys().isdisjoint(CREDENTIALS)]

    def reset(self) -> None:
        """Remove all jobs, files, objects and requests; the clock and the rules stay."""
        for kept in (self.world.blobs, self.world.files, self.world.jobs, self.seen):
            kept.clear()

    def stats(self) -> dict[str, Any]:
        now = self.clock.now()
        return {
            "now": now,
            "jobs": Counter(f"{one.provider}.{one.stage(now)}" for one in self.world.jobs.values()),
            "requests": Counter(one.route for one in self.seen),
            "leaks": len(self.leaks),
        }

    def handle(self, call: Call, port: str) -> None:
        """Find the handler, apply a fault if a rule says so, and answer."""
        self.world.publish()
        seen = self._note(call, port)
        refuse, handler = self._route(call, seen)
        if handler is None:
            call.reply(refuse(self._nothing(call)))
            return
        is_control = seen.route.startswith("simulator.")
        asked = f"{call.target.decode('latin-1')} {call.body[:_BODY_MATCHED].decode('utf-8', 'replace')}"
        fault = None if is_control else self.faults.of_request(seen.route, asked)
        seen.fault = None if fault is None else str(fault)
        if fault is None:
            call.reply(_answered(handler, refuse))
        else:
            self._fail(call, fault, handler, refuse)

    def _note(self, call: Call, port: str) -> Seen:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers.items()}
        seen = Seen(self.clock.now(), port, call.verb, call.path, call.query, headers, call.body[:_BODY_KEPT])
        if not call.path.startswith("/simulator/"):
            self.seen.append(seen)
        call.work = seen
        return seen

    def _route(self, call: Call, seen: Seen) -> tuple[Refuse, Handler | None]:
        if seen.port == _SIGNED:
            seen.route = f"{_SIGNED}.{call.verb.lower()}"
            return _xml_error, lambda: self._signed(call)
        name, _, rest = call.path[1:].partition("/")
        protocol = self._protocols.get(name)
        if protocol is None:
            seen.route = f"simulator.{rest}"
            return _plain_error, lambda: self._control(call)
        found = protocol.find(call, f"/{rest}")
        if found is None:
            return protocol.error, None
        seen.route = f"{name}.{found[0]}"
        if not self._is_known(protocol.key_of(call)):
            return protocol.error, lambda: _refuse(protocol.auth)
        return protocol.error, found[1]

    def _nothing(self, call: Call) -> Refused:
        name, _, rest = call.path[1:].partition("/")
        if self._protocols[name].has(f"/{rest}"):
            return Refused(405, f"{call.path} does not accept {call.verb}")
        return Refused(404, f"there is nothing at {call.path}")

    def _is_known(self, key: str | None) -> bool:
        wanted = self.settings.api_key
        return bool(key) and (REFUSED_KEY not in str(key) if wanted is None else key == wanted)

    def _fail(self, call: Call, fault: Fault, handler: Handler, refuse: Refuse) -> None:
        protocol = self._protocols.get(call.path[1:].partition("/")[0])
        if fault.kind in ("drop", "hang", "not_json", "slow", "truncate") or fault.accepted:
            self._spoil(call, fault, _answered(handler, refuse), refuse)
        elif fault.kind == "hang_up":
            call.cut(reset=False)
        elif fault.kind in ("auth", "quota") and protocol is not None:
            call.reply(_answered(lambda: _refuse(getattr(protocol, fault.kind)), refuse))
        elif fault.kind == "expired_url":
            call.reply(refuse(Refused(403, "the signed URL has expired", "AuthenticationFailed")))
        else:
            call.reply(refuse(self._make_refusal(fault)))

    def _spoil(self, call: Call, fault: Fault, good: Answer, refuse: Refuse) -> None:
        """Damage only the answer: the request has been carried out."""
        match fault.kind:
            case "drop":
                call.cut(reset=False)
            case "hang":
                call.held = asyncio.get_running_loop().call_later(_HANG_SECONDS, lambda: call.cut(reset=False))
            case "slow":
                call.reply(good, Break(kind="drip", bytes=64, every=fault.seconds))
            case "truncate":
                call.reply(good, Break(kind="truncate"))
            case "not_json":
                call.reply(Answer(200, b"<html><body><h1>Bad Gateway</h1></body></html>", "text/html"))
            case _:
                call.reply(refuse(self._make_refusal(fault)))

    def _make_refusal(self, fault: Fault) -> Refused:
        status = int(fault.kind) if fault.kind.isdecimal() else 500
        refused = Refused(status, fault.message or f"a fault rule asks for status {status}", fault.code)
        if (wait := fault.retry_after) is not None:
            later = wait.removeprefix("date+")
            refused.headers["retry-after"] = (
                wait if later == wait else formatdate(self.clock.now() + float(later), usegmt=True)
            )
        return refused

    def _signed(self, call: Call) -> Answer:
        """One object of a bucket; the signature alone grants access."""
        where = self.world.opened(call)
        if call.verb == "PUT":
            self.world.put_blob(*where, call.body, call.header("content-type") or OCTETS)
            return Answer(200 if call.header("x-ms-blob-type") is None else 201)
        if (blob := self.world.blobs.get(where)) is None:
            raise Refused(404, f"there is no object {where}", "BlobNotFound")
        return Answer(200, blob.data, blob.type)

    def _control(self, call: Call) -> Answer:
        match call.verb, call.path:
            case "GET", "/health":
                return answer({"status": "ok"})
            case "GET", "/simulator/providers":
                return answer({"urls": self.urls, "signed_url": self.signed_url})
            case "GET", "/simulator/stats":
                return answer(self.stats())
            case "GET", "/simulator/jobs":
                found = self.jobs(call.query.get("marker"), call.query.get("provider"))
                return answer({"jobs": [self._job(one) for one in found], "count": len(found)})
            case "GET", "/simulator/requests":
                asked = self.requests(call.query.get("route"), call.query.get("port"))
                return answer({"requests": [one.to_dict() for one in asked], "count": len(asked)})
            case "POST", "/simulator/clock":
                self._set_clock(call.json())
                return answer({"now": self.clock.now()})
            case "POST", "/simulator/faults":
                self.put_faults(*call.json().get("faults", []))
                return self._rules()
            case "GET", "/simulator/faults":
                return self._rules()
            case "POST", "/simulator/reset":
                self.reset()
                return answer({})
        raise Refused(404, f"there is nothing at {call.verb} {call.path}", "unknown_url")

    def _set_clock(self, body: dict[str, Any]) -> None:
        match body:
            case {"advance": float() | int() as seconds}:
                self.advance(seconds)
            case {"set": float() | int() as now}:
                self.clock.set(now)
            case _:
                raise Refused(400, 'send {"advance": 60}, or {"set": 1800000000}')

    def _rules(self) -> Answer:
        rules = zip(self.faults.rules, self.faults.fired, strict=True)
        return answer({"faults": [{"fault": str(rule), "fired": fired} for rule, fired in rules]})

    def _job(self, job: Job) -> dict[str, Any]:
        now = self.clock.now()
        counts = job.counts(now)
        return {
            "id": job.id,
            "provider": job.provider,
            "stage": job.stage(now),
            "created_at": job.created_at,
            "total": counts.total,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "faults": {kind: str(fault) for kind, fault in job.faults.items()},
        }


Refuse = Callable[[Refused], Answer]


class Door:
    """One listening port of the server."""

    def __init__(self, server: Server, name: str) -> None:
        self.body_bytes_max = server.settings.body_bytes_max
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._name = name
        self._server = server

    async def open(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(lambda: Wire(self), host, port, backlog=1024)
        except OSError as error:
            raise ConfigurationError(f"the simulator cannot listen on {host}:{port}: {error}") from error
        found = self._listener.sockets[0].getsockname()
        return f"http://[{found[0]}]:{found[1]}" if ":" in found[0] else f"http://{found[0]}:{found[1]}"

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.transport.abort()

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def handle(self, exchange: Exchange) -> None:
        assert isinstance(exchange, Call)
        self._server.handle(exchange, self._name)

    def lost(self, exchange: Exchange) -> None:
        if exchange.held is not None:
            exchange.held.cancel()

    def sent(self, exchange: Exchange, status: int) -> None:
        if isinstance(exchange.work, Seen):
            exchange.work.status = status


def _answered(handler: Handler, refuse: Refuse) -> Answer:
    try:
        return handler()
    except Refused as refused:
        return refuse(refused)
    except InvalidInput as error:
        return refuse(Refused(400, str(error)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return refuse(Refused(400, f"the request is invalid: {error!r}"))


def _refuse(refusal: tuple[int, str, str]) -> Answer:
    raise Refused(*refusal)


def _plain_error(refused: Refused) -> Answer:
    return Answer(refused.status, error_body(refused.status, refused.message, code=refused.code))


def _xml_error(refused: Refused) -> Answer:
    """The error in the format of Azure's and Google's storage."""
    said = f"<Error><Code>{refused.code or 'Error'}</Code><Message>{refused.message}</Message></Error>"
    return Answer(refused.status, f'<?xml version="1.0" encoding="utf-8"?>{said}'.encode(), XML, refused.headers)
