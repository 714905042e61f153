"""The simulator: it answers requests like a model, injects faults, and has control endpoints with counters."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import orjson
import xxhash

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.simulator import faults
from batchwright.simulator.answers import Author, Formed, Written, error_body, models_body
from batchwright.simulator.bodies import ENDPOINTS, SILENT, Ask, read
from batchwright.simulator.counters import Counters, Spread
from batchwright.simulator.faults import Fault, Faults
from batchwright.simulator.http import Connection, Exchange
from batchwright.simulator.model import ModelServer, Ticket
from batchwright.simulator.prefix_cache import BLOCK_TOKENS, chain, tokens
from batchwright.simulator.profiles import Profile

_ENDPOINTS = {path.encode(): endpoint for path, endpoint in ENDPOINTS.items()}
_LISTED_MAX = 10_000
_TICK_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """What to simulate."""

    models: Mapping[str, Profile] = field(default_factory=dict)
    """The models that the server knows, each with its capacity."""
    any_model: Profile | None = None
    """The capacity of every other model; by default other models are not found."""
    any_model_max: int = 64
    """Maximum number of models that are created because a request names them; further ones are not found."""
    api_key: str | None = None
    """The bearer key that requests must have; by default none is required."""
    asked_max: int = 1_000_000
    """Maximum number of distinct requests that are counted."""
    body_bytes_max: int = 64 << 20
    """Maximum size of a request's body."""
    faults: Sequence[str] = ()
    """Rules by which requests fail, such as `429:0.05:retry_after=2`."""
    is_prompt_obeyed: bool = True
    """Whether `[[fault:500]]` in a prompt triggers that fault."""
    seed: int = 0
    """Equal seeds give equal answers, lengths and faults for equal requests."""
    time_scale: float = 1.0
    """Number of simulated seconds per real second."""

    def __post_init__(self) -> None:
        if not 0 < self.time_scale < math.inf:
            raise ConfigurationError(f"time_scale is {self.time_scale}, but must be more than 0")


class Work:
    """A request that the model works on, and everything needed to answer it."""

    __slots__ = ("ask", "exchange", "fault", "formed", "key", "simulated", "ticket", "tokens_each")

    def __init__(self, exchange: Exchange, simulated: SimulatedModel, ask: Ask, key: int, fault: Fault | None) -> None:
        self.ask = ask
        self.exchange = exchange
        self.fault = fault
        self.formed: list[Formed] | None = None
        self.key = key
        self.simulated = simulated
        self.ticket: Ticket[Work] | None = None
        self.tokens_each = 0


class SimulatedModel:
    """One model: its server, the timer for its next event, and its counters."""

    def __init__(self, profile: Profile) -> None:
        self.server: ModelServer[Work] = ModelServer(profile)
        self.alarm: asyncio.TimerHandle | None = None
        self.alarm_at = math.inf
        self.reset(0.0)

    def reset(self, now: float) -> None:
        self.since = now
        self.served = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.waited = Spread()
        self.took = Spread()

    def summary(self, now: float) -> dict[str, Any]:
        server = self.server
        seconds = max(now - self.since, 1e-9)
        return {
            "profile": dataclasses.asdict(server.profile),
            "served": self.served,
            "refused": self.refused,
            "running": server.running,
            "running_max": server.running_max,
            "waiting": len(server.waiting),
            "waiting_max": server.waiting_max,
            "utilisation": round(server.slot_seconds_at(now) / seconds / server.profile.max_running, 6),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "block_tokens": self._block_tokens(),
            "simulated_seconds": round(seconds, 3),
            "wait_seconds": self.waited.summary(),
            "total_seconds": self.took.summary(),
        }

    def _block_tokens(self) -> dict[str, Any]:
        cache = self.server.cache
        total, cached, distinct = (
            BLOCK_TOKENS * n for n in (cache.total_blocks, cache.cached_blocks, cache.distinct_blocks)
        )
        share = round(cached / (total - distinct), 6) if total > distinct else None
        exact = {"is_exact": cache.is_exact, "held": BLOCK_TOKENS * len(cache)}
        return {"total": total, "cached": cached, "distinct": distinct, "cached_share": share, **exact}


class Simulator:
    """An OpenAI-compatible server in this event loop."""

    def __init__(self, settings: SimulatorSettings | None = None) -> None:
        self.settings = settings or SimulatorSettings(any_model=Profile())
        self.body_bytes_max = self.settings.body_bytes_max
        self.counters = Counters(self.settings.asked_max)
        self.url = ""
        self._author = Author(self.settings.seed)
        self._connections: set[Connection] = set()
        self._faults = Faults([faults.parse(text) for text in self.settings.faults], self.settings.seed)
        self._key = f"Bearer {self.settings.api_key}".encode() if self.settings.api_key else None
        self._simulated = {name: SimulatedModel(profile) for name, profile in self.settings.models.items()}
        self._listener: asyncio.Server | None = None
        self._number = 0
        self._opened_at = time.monotonic()

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> Simulator:
        """Listen; port 0 takes a free one. `url` says where."""
        self._loop = asyncio.get_running_loop()
        try:
            self._listener = await self._loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        except OSError as error:
            raise ConfigurationError(f"the simulator cannot listen on {host}:{port}: {error}") from error
        found = self._listener.sockets[0].getsockname()
        self.url = f"http://[{found[0]}]:{found[1]}" if ":" in found[0] else f"http://{found[0]}:{found[1]}"
        return self

    async def close(self) -> None:
        """Cut every connection."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.transport.abort()
        for simulated in self._simulated.values():
            if simulated.alarm is not None:
                simulated.alarm.cancel()
        await asyncio.sleep(0)

    def stats(self) -> dict[str, Any]:
        now = self._now()
        models = {name: simulated.summary(now) for name, simulated in self._simulated.items()}
        return {**self.counters.summary(), "time_scale": self.settings.time_scale, "models": models}

    def asked(self, *, over: int = 0, by: str = "body", limit: int = 1000) -> dict[str, Any]:
        """How often each distinct request arrived, by its body, its x-request-id, or as answered by the model."""
        tables = {"body": self.counters.by_body, "request_id": self.counters.by_request_id}
        table = {**tables, "served": self.counters.by_served}.get(by)
        if table is None:
            raise InvalidInput(f"by={by!r} is unknown; use body, request_id or served", param="by")
        return table.summary(over, min(limit, _LISTED_MAX))

    def put_faults(self, rules: Sequence[str]) -> None:
        """Replace the rules."""
        self._faults.put([faults.parse(text) for text in rules])

    def change(self, model: str, values: Mapping[str, Any]) -> None:
        """Change numbers in the profile of a model, from now on."""
        simulated = self._find(model)
        if simulated is None:
            raise InvalidInput(f"there is no model {model!r}; use one of: {', '.join(self._simulated)}", param="model")
        simulated.server.change(self._now(), simulated.server.profile.with_values(values))
        self._settle(simulated)

    def reset(self) -> None:
        """Reset the counts and empty the caches; faults and requests in flight stay."""
        self.counters = self.counters.renewed(self.settings.asked_max)
        for simulated in self._simulated.values():
            now = self._now()
            simulated.server.reset(now)
            simulated.reset(now)

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)
        self.counters.connected()

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.counters.connections_closed += 1

    def handle(self, exchange: Exchange) -> None:
        path, _, query = exchange.target.partition(b"?")
        endpoint = _ENDPOINTS.get(path)
        if endpoint is not None and exchange.method == b"POST":
            self._ask(exchange, endpoint)
        elif path != b"/health" and not self._is_known(exchange):
            self._refuse_key(exchange)
        else:
            try:
                exchange.send(*self._control(exchange, path.decode("latin-1"), query.decode("latin-1")))
            except (InvalidInput, ConfigurationError) as error:
                exchange.send(400, error_body(400, str(error)))

    def sent(self, exchange: Exchange, status: int) -> None:
        if exchange.is_counted:
            self.counters.ended(status)

    def lost(self, exchange: Exchange) -> None:
        """The client closed the connection before its answer was complete."""
        if exchange.held is not None:
            exchange.held.cancel()
        if not exchange.is_counted:
            return
        exchange.is_counted = False  # its model may finish it at the same moment
        where = "held"
        work = exchange.work
        if isinstance(work, Work) and (ticket := work.ticket) is not None:
            if ticket.started_at is None:
                where = "queued"
            elif ticket.seat is not None:
                where = "running"
            work.simulated.server.abort(self._now(), ticket)
            self._settle(work.simulated)
        self.counters.lost(where, time.monotonic() - exchange.since)

    def _ask(self, exchange: Exchange, endpoint: str) -> None:
        exchange.is_counted = True
        exchange.since = time.monotonic()
        counters = self.counters
        counters.began(endpoint)
        key = xxhash.xxh3_64_intdigest(exchange.body)
        asked = counters.by_body.add(key)
        if (request_id := exchange.headers.get(b"x-request-id")) is not None:
            counters.by_request_id.add(request_id.decode("latin-1"))
        if not self._is_known(exchange):
            self._refuse_key(exchange)
            return
        try:
            self._take(exchange, endpoint, key, asked)
        except InvalidInput as error:
            exchange.send(400, error_body(400, str(error), param=error.param))

    def _take(self, exchange: Exchange, endpoint: str, key: int, asked: int) -> None:
        """Answer a request by its model or by a fault."""
        ask = read(endpoint, exchange.body)
        fault = self._fault(exchange, ask, key, asked)
        if fault is not None:
            self.counters.faults[fault.kind] += 1
        if fault is not None and fault.is_early:
            self._fail(exchange, fault)
        elif (simulated := self._find(ask.model)) is None:
            message = f"The model `{ask.model}` does not exist or you do not have access to it."
            exchange.send(404, error_body(404, message))
        else:
            self._submit(Work(exchange, simulated, ask, key, fault))

    def _fault(self, exchange: Exchange, ask: Ask, key: int, asked: int) -> Fault | None:
        """The fault of a request: one that its prompt asks for, or else one by the rules."""
        text = exchange.headers.get(b"x-simulator-fault")
        if text is None and self.settings.is_prompt_obeyed and b"[[fault:" in exchange.body:
            found = faults.IN_PROMPT.search(exchange.body)
            text = found[1] if found is not None else None
        if text is None:
            return self._faults.choose(ask.model, exchange.body, key, asked) if self._faults.rules else None
        return Faults([faults.parse(text.decode("latin-1"))], self.settings.seed).choose(
            ask.model, exchange.body, key, asked
        )

    def _fail(self, exchange: Exchange, fault: Fault) -> None:
        """Faults that happen before the model does any work."""
        if (status := fault.status) is not None:
            message = fault.message or f"a fault rule asks for status {status}"
            extra = _retry_after(fault.retry_after if fault.retry_after is not None else 1 if status == 429 else None)
            exchange.send(status, error_body(status, message, code=fault.code), extra)
        elif fault.kind == "hang":
            seconds = 3600.0 if fault.seconds is None else fault.seconds
            exchange.held = self._loop.call_later(seconds, lambda: exchange.cut(reset=False))
        else:
            exchange.cut(reset=fault.kind == "reset")

    def _submit(self, work: Work) -> None:
        ask, simulated, profile = work.ask, work.simulated, work.simulated.server.profile
        prompt_tokens = sum(map(tokens, ask.prompts))
        is_written = ask.endpoint not in SILENT
        if is_written:
            work.tokens_each = ask.max_tokens or self._author.length(ask.prompts[0], profile)
        output = work.tokens_each * ask.choices * len(ask.prompts)
        if ask.form is not None:
            is_bad = work.fault is not None and work.fault.kind == "bad_json"
            work.formed = self._author.formed(ask, ask.form, profile, is_bad=is_bad)
            output = sum(one.tokens for one in work.formed)
        if profile.context_tokens is not None and prompt_tokens + output > profile.context_tokens:
            message = f"{prompt_tokens} + {output} tokens are more than the context of {profile.context_tokens}"
            work.exchange.send(400, error_body(400, message, code="context_length_exceeded"))
            return
        links = chain(ask.prompts[0]) if is_written and profile.cache_blocks and len(ask.prompts) == 1 else ()
        work.ticket = Ticket(work, prompt_tokens=prompt_tokens, output_tokens=output, links=links)
        work.exchange.work = work
        if simulated.server.arrive(self._now(), work.ticket):
            self._settle(simulated)
        else:
            work.ticket = None
            self._refuse_load(work.exchange, simulated)

    def _settle(self, simulated: SimulatedModel) -> None:
        """Answer what is done, and set the timer for the next event."""
        now = self._now()
        for ticket in simulated.server.advance(now):
            self._deliver(ticket, now)
        due = simulated.server.next_at()
        if simulated.alarm is not None and simulated.alarm_at <= due:
            return  # the timer will check again; most arrivals delay the next event
        if simulated.alarm is not None:
            simulated.alarm.cancel()
            simulated.alarm = None
        if due < math.inf:
            simulated.alarm_at = due
            # Timers have a resolution of milliseconds: a shorter one would spin.
            delay = max(_TICK_SECONDS, (due - now) / self.settings.time_scale)
            simulated.alarm = self._loop.call_later(delay, self._ring, simulated)

    def _ring(self, simulated: SimulatedModel) -> None:
        simulated.alarm = None
        self._settle(simulated)

    def _deliver(self, ticket: Ticket[Work], now: float) -> None:
        work, simulated = ticket.owner, ticket.owner.simulated
        work.ticket = None
        simulated.served += 1
        simulated.prompt_tokens += ticket.prompt_tokens
        simulated.cached_tokens += ticket.cached_tokens
        simulated.completion_tokens += ticket.output_tokens
        simulated.waited.add((ticket.started_at or now) - ticket.arrived_at)
        simulated.took.add(now - ticket.arrived_at)
        self.counters.by_served.add(work.key)
        body = self._written(work, ticket)
        if work.fault is not None and work.fault.kind == "slow":
            seconds = 5.0 if work.fault.seconds is None else work.fault.seconds
            work.exchange.held = self._loop.call_later(seconds, self._send, work, body)
        else:
            self._send(work, body)

    def _written(self, work: Work, ticket: Ticket[Work]) -> bytes:
        self._number += 1
        done = Written(
            number=self._number,
            created=int(time.time()),
            prompt_tokens=ticket.prompt_tokens,
            cached_tokens=ticket.cached_tokens,
            tokens_each=work.tokens_each,
            formed=work.formed,
        )
        return self._author.answer(
            work.ask, done, work.ask.dimensions or work.simulated.server.profile.embedding_dimensions
        )

    def _send(self, work: Work, body: bytes) -> None:
        exchange, fault = work.exchange, work.fault
        request_id = exchange.headers.get(b"x-request-id") or b"req_%016x" % self._number
        extra = b"x-request-id: %b\r\n" % request_id
        exchange.send(200, body if fault is None else faults.spoil(fault, body), extra, fault)

    def _find(self, model: str) -> SimulatedModel | None:
        simulated = self._simulated.get(model)
        has_room = len(self._simulated) < len(self.settings.models) + self.settings.any_model_max
        if simulated is None and self.settings.any_model is not None and has_room:
            simulated = self._simulated[model] = SimulatedModel(self.settings.any_model)
            simulated.reset(self._now())
            simulated.server.reset(self._now())
        return simulated

    def _is_known(self, exchange: Exchange) -> bool:
        return self._key is None or exchange.headers.get(b"authorization") == self._key

    def _refuse_key(self, exchange: Exchange) -> None:
        exchange.send(401, error_body(401, "Incorrect API key provided."))

    def _refuse_load(self, exchange: Exchange, simulated: SimulatedModel) -> None:
        simulated.refused += 1
        profile = simulated.server.profile
        message = f"the server is full: {profile.max_running} requests run and {profile.max_waiting} wait"
        exchange.send(
            profile.refuse_status, error_body(profile.refuse_status, message), _retry_after(profile.retry_after)
        )

    def _now(self) -> float:
        return (time.monotonic() - self._opened_at) * self.settings.time_scale

    def _control(self, exchange: Exchange, path: str, query: str) -> tuple[int, bytes]:
        verb = "GET" if exchange.method == b"HEAD" else exchange.method.decode()
        match verb, path:
            case "GET", "/health":
                return 200, b'{"status":"ok"}'
            case "GET", "/v1/models":
                return 200, models_body(list(self._simulated), int(self.counters.started_at))
            case "GET", "/simulator/stats":
                return 200, _json(self.stats())
            case "GET", "/simulator/asked":
                return 200, _json(self.asked(**_asked_options(query)))
            case "GET", "/simulator/faults":
                return 200, _json(self._fault_list())
            case "POST", "/simulator/faults":
                self.put_faults(_rules(exchange.body))
                return 200, _json(self._fault_list())
            case "POST", "/simulator/models":
                self.change(*_change(exchange.body))
                return 200, _json(self.stats()["models"])
            case "POST", "/simulator/reset":
                self.reset()
                return 200, b"{}"
        if path.encode() in _ENDPOINTS or path in _CONTROL:
            return 405, error_body(405, f"{path} does not accept {verb}")
        return 404, error_body(404, f"there is nothing at {path}", code="unknown_url")

    def _fault_list(self) -> dict[str, Any]:
        rules = zip(self._faults.rules, self._faults.fired, strict=True)
        return {"faults": [{"fault": str(rule), "fired": fired} for rule, fired in rules]}


_CONTROL = (
    "/health", "/v1/models", "/simulator/asked", "/simulator/faults", "/simulator/models", "/simulator/reset",
    "/simulator/stats",
)  # fmt: skip


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _asked_options(query: str) -> dict[str, Any]:
    found = {name: values[-1] for name, values in parse_qs(query).items()}
    try:
        return {name: value if name == "by" else int(value) for name, value in _only(found, "by", "limit", "over")}
    except ValueError as error:
        raise InvalidInput(f"over and limit must be numbers: {error}") from error


def _only(found: Mapping[str, str], *known: str) -> Sequence[tuple[str, str]]:
    if unknown := set(found) - set(known):
        raise InvalidInput(f"{unknown.pop()!r} is not an option; use one of: {', '.join(known)}")
    return list(found.items())


def _rules(body: bytes) -> list[str]:
    rules = _object(body).get("faults")
    if not isinstance(rules, list) or not all(isinstance(one, str) for one in rules):
        raise InvalidInput('send {"faults": ["429:0.05:retry_after=2"]}; an empty list removes all rules')
    return rules


def _change(body: bytes) -> tuple[str, dict[str, Any]]:
    values = _object(body)
    model = values.pop("model", None)
    if not isinstance(model, str):
        raise InvalidInput('send {"model": "qwen", "max_running": 8}')
    return model, values


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object")
    return value


def _retry_after(seconds: float | None) -> bytes:
    return b"" if seconds is None else f"retry-after: {seconds:g}\r\n".encode()
