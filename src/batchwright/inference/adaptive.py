"""A limit on requests in flight that finds out how much load a model server can handle.

    starting    doubles each round trip. On overload: recovering. When throughput stops rising: holding.
    recovering  was halved by overload. Adds an eighth of the ceiling per round trip. At the ceiling: holding.
    holding     stays for some round trips. Then: probing.
    probing     adds 1, 2, 4, … per round trip. On overload: recovering. When throughput stops rising: holding.

Time is passed in, so a simulation runs as fast as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What an adaptive limit is doing; the module's docstring describes the transitions."""

    STARTING = "starting"
    HOLDING = "holding"
    PROBING = "probing"
    RECOVERING = "recovering"


_STARTING = Phase.STARTING
"""Used for every answer; access through the enum takes five times as long."""


class Sent(msgspec.Struct, frozen=True):
    """When a request was sent, and how many were then in flight, itself included."""

    at: float
    in_flight: int


@dataclass(slots=True)
class _Window:
    """A round trip, or the time to see enough answers to measure throughput."""

    since: float
    answers_wanted: int
    answers: int = 0
    load: int = 0
    was_full: bool = False

    def add(self, in_flight: int, limit: int, now: float, round_seconds: float) -> bool:
        """Count an answer; True if the window is over."""
        self.answers += 1
        self.load += in_flight
        if in_flight >= limit:
            self.was_full = True
        rounds = 1 if self.answers >= self.answers_wanted else 4
        return now - self.since >= rounds * (round_seconds or 1e-6)

    def seen(self, now: float) -> _Load:
        return _Load(self.load / max(self.answers, 1), self.answers / max(now - self.since, 1e-6))


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests in flight, and the resulting answers per second."""

    in_flight: float
    throughput: float

    def mixed(self, other: _Load) -> _Load:
        """A weighted mean: three parts of this and one of the other."""
        return _Load(self.in_flight * 0.75 + other.in_flight * 0.25, self.throughput * 0.75 + other.throughput * 0.25)


class AdaptiveLimit:
    """How many requests one model at one endpoint can handle, found by probing.

    It grows only if the limit was reached. Overload halves it, at most once per round trip: signals of requests that
    were sent before the last cut say nothing new. The number in flight when the refused request was sent marks the
    ceiling, so recovery is quick. Growth that does not raise throughput is undone, because a server that queues
    instead of refusing shows its limit in no other way. Each unsuccessful probe doubles the time to the next.
    """

    GAIN_MIN = 0.15
    """Throughput must rise by at least this share of what the load rose by."""
    GAIN_CLEAR = 0.5
    """When it rises by this share, growth continues immediately."""
    HOLD_ROUNDS = (4, 32)
    HOLD_SECONDS_MAX = 30.0
    PAUSE_SECONDS = (0.1, 5.0)
    PROBE_SHARE = 0.5
    """A probe is judged once the limit has risen by this share."""
    RECOVERY_ROUNDS = 4
    WINDOW_ANSWERS = 20

    def __init__(self, *, start: int = 10, least: int = 1, most: int = 100, now: float) -> None:
        assert 1 <= least <= start <= most
        self.phase = Phase.STARTING
        self._least = least
        self._most = most
        self.limit = start
        """Maximum number of requests in flight. A plain attribute, because it is read several times per request."""
        self._limit = float(start)
        self._ceiling = float(most)
        self._cut_at = float("-inf")
        self._cuts_in_a_row = 0
        self.quiet_until = now
        """Until then nothing is sent: the server refused several requests in a row and answered none. A plain
        attribute, because it is read for every request."""
        self._hold_rounds = self.HOLD_ROUNDS[0]
        self._past_ceiling = 0.0
        self._phase_since = now
        self._round_seconds = 0.0
        self._step = 1.0
        self._has_settled = False
        self._before: _Load | None = None
        self._window = _Window(now, self.WINDOW_ANSWERS)

    @property
    def round_seconds(self) -> float:
        """Recent response time; 0 before the first answer."""
        return self._round_seconds

    def wait_seconds(self, now: float) -> float:
        """How long to send nothing."""
        return max(0.0, self.quiet_until - now)

    def answered(self, sent: Sent, now: float) -> None:
        """The model answered a request: the only sign of progress."""
        self._cuts_in_a_row = 0
        taken, usual = now - sent.at, self._round_seconds
        self._round_seconds = usual = usual + (taken - usual) * (0.05 if usual else 1.0)
        if self.phase is _STARTING and self.limit < self._most and sent.in_flight >= self.limit // 2:
            self._set_limit(self._limit + 1)
        window = self._window
        if now >= window.since and window.add(sent.in_flight, self.limit, now, usual):
            self._window = _Window(now, self.WINDOW_ANSWERS)
            self._step_on(window.seen(now), window.was_full, now)

    def overloaded(self, sent: Sent, now: float) -> None:
        """A 429, a 503 or a timeout: the request found the server full."""
        if sent.at <= self._cut_at:
            return
        self._cut_at = now
        self._cuts_in_a_row += 1
        if self._cuts_in_a_row > 1:
            first, longest = self.PAUSE_SECONDS
            self.quiet_until = now + min(first * 2.0 ** min(self._cuts_in_a_row - 2, 20), longest)
        if self.phase is Phase.PROBING:
            self._be_patient()
        elif self.phase is not Phase.STARTING:
            self._hold_rounds = self.HOLD_ROUNDS[0]
        self._ceiling = max(float(self._least), min(self._limit, sent.in_flight - 1.0))
        self._set_limit(min(self._limit, float(sent.in_flight)) / 2)
        self._enter(Phase.RECOVERING, now)

    def _step_on(self, seen: _Load, was_full: bool, now: float) -> None:
        """Judge a window that has ended, and take the next step."""
        match self.phase:
            case Phase.STARTING:
                self._start(seen, now)
            case Phase.RECOVERING if was_full:
                self._recover(now)
            case Phase.HOLDING if was_full:
                self._hold(seen, now)
            case Phase.PROBING if was_full:
                self._probe(seen, now)

    def _start(self, seen: _Load, now: float) -> None:
        if self._before is not None and _is_flat(self._before, seen, self.GAIN_MIN):
            self._set_limit(min(self._limit / 2, 1.25 * self._before.in_flight))
            self._enter(Phase.HOLDING, now)
        else:
            self._before = seen

    def _recover(self, now: float) -> None:
        self._set_limit(min(self._limit + self._ceiling / (2 * self.RECOVERY_ROUNDS), self._ceiling))
        self._window = _Window(now, 1)
        if self._limit >= self._ceiling:
            self._enter(Phase.HOLDING, now)

    def _hold(self, seen: _Load, now: float) -> None:
        before = self._before = seen if self._before is None else self._before.mixed(seen)
        patience = min(self._hold_rounds * self._round_seconds, self.HOLD_SECONDS_MAX)
        if now - self._phase_since >= patience and self._limit < self._most:
            self._ceiling = self._limit
            self._enter(Phase.PROBING, now)
            self._before = before
            self._climb(now)

    def _probe(self, seen: _Load, now: float) -> None:
        """Add 1, 2, 4, … while throughput follows. If that is unclear, let it settle, then judge."""
        assert self._before is not None
        if self._limit < self._target:
            self._climb(now)
        elif not self._has_settled and not _is_flat(self._before, seen, self.GAIN_CLEAR):
            self._before, self._ceiling = seen, self._limit
            self._climb(now)
        elif not self._has_settled:
            self._has_settled = True
            self._window = _Window(now + self._round_seconds, 4 * self.WINDOW_ANSWERS)
        elif _is_flat(self._before, seen, self.GAIN_MIN):
            self._be_patient()
            self._set_limit(self._ceiling)
            self._enter(Phase.HOLDING, now)
        else:
            self._hold_rounds = self.HOLD_ROUNDS[0]
            self._enter(Phase.HOLDING, now)

    def _climb(self, now: float) -> None:
        self._set_limit(self._limit + self._step)
        self._step *= 2
        if self._limit < self._target:
            self._window = _Window(now, 1)

    @property
    def _target(self) -> float:
        """The limit from which on a probe can be judged."""
        return min(self._ceiling * (1 + self.PROBE_SHARE), float(self._most))

    def _be_patient(self) -> None:
        """Delay the next probe, but probe soon if the server handles far less load than before: it may recover."""
        few, many = self.HOLD_ROUNDS
        self._past_ceiling = max(self._ceiling, 0.9 * self._past_ceiling)
        self._hold_rounds = min(2 * self._hold_rounds, many if self._ceiling > self._past_ceiling / 2 else 2 * few)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self._phase_since = now
        self._step = 1.0
        self._has_settled = False
        self._before = None
        # Answers in the first round trip belong to requests that were sent under the old limit.
        self._window = _Window(now + self._round_seconds * (phase is Phase.HOLDING), self.WINDOW_ANSWERS)

    def _set_limit(self, limit: float) -> None:
        self._limit = max(float(self._least), min(limit, float(self._most)))
        self.limit = int(self._limit)


def _is_flat(before: _Load, seen: _Load, gain_min: float) -> bool:
    """Whether more load brought too little throughput. If the load rose only a little, this cannot be judged."""
    growth = seen.in_flight / before.in_flight - 1 if before.in_flight else 0.0
    return growth >= 0.1 and seen.throughput < before.throughput * (1 + gain_min * growth)
