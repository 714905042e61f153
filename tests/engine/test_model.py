"""Random verbs on a real PostgreSQL against an oracle in memory: after every step the two must agree.

`BATCHWRIGHT_TEST_MODEL_EXAMPLES=5000 pytest tests/engine/test_model.py` is the long form. A failure prints the steps
and a blob for `@reproduce_failure`.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from batchwright import NewJob
from batchwright.db.database import Blocking, Database, complete
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import Claim
from batchwright.engine.outcomes import Settle, Wait
from batchwright.engine.queue import EngineSettings, Lane, Queue
from batchwright.errors import Conflict, InvalidInput
from batchwright.states import JOB, JobStatus
from tests.engine.oracle import LEASE, OPEN, STALE, Oracle, Refused, Row
from tests.support import BASIC, DATABASE, allows

IS_LONG = "BATCHWRIGHT_TEST_MODEL_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("BATCHWRIGHT_TEST_MODEL_EXAMPLES", "60"))
STEPS = 8
MOVES_MAX = 10
ENGINE = EngineSettings(
    lease_seconds=LEASE.total_seconds(), stale_job_timeout_seconds=STALE.total_seconds(), rescue_jitter_seconds=0.0
)
LANES = [Lane("default", priority, 1000) for priority in range(10)]
COMPARED = (
    "status", "run_after", "deadline", "deadline_passed", "attempts", "rescues", "claims", "locked_by", "locked_at",
    "lease_until", "is_current", "waits", "round", "parent_job_id", "on_join", "children_open", "children_failed",
    "progress_current", "progress_total", "message",
)  # fmt: skip
READ_JOBS = f"SELECT id, finished_at IS NOT NULL, {', '.join(COMPARED)} FROM batchwright.job"
READ_EVENTS = """
SELECT id, job_id, status::text, claim, attempt FROM batchwright.job_event WHERE id > %(after)s ORDER BY id
"""

indexes = st.integers(0, 10**6)
workers = st.sampled_from(["w1", "w2"])
delays = st.sampled_from([0.0, 0.0, 0.0, 5.0, 60.0])
deadlines = st.sampled_from([None, None, None, 3.0, 40.0])
keys = st.sampled_from(["k1", "k2"])
children = st.lists(
    st.fixed_dictionaries({"max_attempts": st.integers(1, 3), "key": st.sampled_from([None, None, None, "k1", "k3"])}),
    max_size=4,
)


CLAIM = {
    "worker": workers,
    "slots": st.sampled_from([1, 2, 3, 100]),
    "freed": st.lists(keys, max_size=2, unique=True),
}
ENQUEUE = {
    "tenant": st.sampled_from(["default", "default", "b"]),
    "priority": st.sampled_from([0, 5, 5, 9]),
    "delay": delays,
    "deadline": deadlines,
    "max_attempts": st.integers(1, 3),
    "key": st.one_of(st.none(), keys),
    "on_held": st.sampled_from(["queue", "queue", "reject", "coalesce", "supersede"]),
}
SETTLE = {
    "verbs": st.lists(
        st.tuples(
            st.sampled_from(["succeed", "succeed", "fail", "retry", "snooze", "release"]),
            indexes,
            st.sampled_from([True, True, True, False]),
            delays,
        ),
        min_size=1,
        max_size=4,
    )
}
WAIT = {
    "index": indexes,
    "held": st.sampled_from([True, True, True, True, False]),
    "children": children,
    "on_join": st.sampled_from(["close", "resume"]),
    "allow_failures": st.sampled_from([0, 0, 1, True]),
}
VERBS: list[tuple[int, str, dict[str, Any]]] = [
    (4, "claim", CLAIM),
    (8, "settle", SETTLE),
    (3, "wait", WAIT),
    (2, "enqueue", ENQUEUE),
    (1, "enqueue_many", {"count": st.integers(2, 5)}),
    (
        1,
        "enqueue_with_an_idempotency_key",
        {
            "number": st.integers(1, 3),
            "n": st.sampled_from([0, 0, 0, 1]),
            "key": st.sampled_from([None, "k1"]),
            "on_held": ENQUEUE["on_held"],
        },
    ),
    (1, "claim_job", {"index": indexes, "worker": workers, "suspect": st.sampled_from([False, False, True])}),
    (1, "renew", {"indexes": st.lists(indexes, min_size=1, max_size=5), "lets_go": st.booleans()}),
    (1, "succeed_with", {"index": indexes, "held": WAIT["held"], "then": st.integers(0, 2)}),
    (1, "emit", {"index": indexes, "held": st.booleans(), "message": st.sampled_from(["half", "most"])}),
    (1, "progress", {"index": indexes, "held": st.booleans(), "current": st.integers(0, 9)}),
    (1, "cancel", {"indexes": st.lists(indexes, min_size=1, max_size=2)}),
    (2, "free_by_hand", {"index": indexes, "verb": st.sampled_from(["recover", "rerun", "rerun", "rerun"])}),
    (2, "rescue", {"deaths": st.lists(indexes, max_size=2)}),
    (1, "expire", {}),
    (2, "advance", {"seconds": st.sampled_from([0.001, 5.0, 5.0, 31.0, 61.0, 2000.0])}),
]
MOVES = st.one_of(
    *(
        st.tuples(st.just(verb), st.fixed_dictionaries(options))
        for weight, verb, options in VERBS
        for _ in range(weight)
    )
)


class Machine(RuleBasedStateMachine):
    """Sends verbs to the database and to the oracle; after each step the two are compared."""

    def __init__(self, database: Blocking) -> None:
        super().__init__()
        complete(database.rows("TRUNCATE batchwright.job, batchwright.job_event, batchwright.queue"))
        ((start,),) = complete(database.rows("SELECT now() + interval '1 day'"))
        self.database = database
        self.oracle = Oracle(start)
        self.queue = Queue(Database(database, clock=lambda: self.oracle.now), ENGINE)
        self.catalog = Catalog(self.queue.database, BASIC)
        self.claims: list[Claim] = []
        self.workers: dict[tuple[Any, int], str] = {}
        self.last_event = 0
        self.events: dict[Any, list[tuple[str, int, int]]] = {}

    @initialize(waits=st.lists(st.sampled_from(["close", "resume"]), max_size=3), worker=workers)
    def begin_with_work_in_hand(self, waits, worker):
        """Begin with jobs that a worker holds, some of which wait for children that it holds too."""
        self.enqueue_many(count=3 + len(waits))
        self.claim(worker=worker, slots=100, freed=[])
        for on_join in waits:
            kids = [{"max_attempts": 2, "key": None}, {"max_attempts": 1, "key": "k2"}]
            self.wait(index=0, held=True, children=kids, on_join=on_join, allow_failures=1)
        self.claim(worker=worker, slots=2, freed=[])

    @rule(moves=st.lists(MOVES, min_size=4, max_size=MOVES_MAX))
    def work_on(self, moves):
        """Apply verbs; one rule for all of them, so that we decide how often each one is chosen."""
        for verb, options in moves:
            if self.claims or verb in ("claim", "enqueue"):
                getattr(self, verb)(**options)

    # Choices ----------------------------------------------------------------------------------------------------

    def a_job(self, index: int) -> Row:
        return list(self.oracle.jobs.values())[index % len(self.oracle.jobs)]

    def a_claim(self, index: int, *, held: bool) -> Claim:
        """A claim that is still valid, or an old one, preferably of a job that another worker runs now."""
        good = [claim for claim in self.claims if self._is_good(claim)]
        stale = [claim for claim in self.claims if claim not in good]
        rivalled = [claim for claim in stale if self.oracle.jobs[claim.id].is_held_by(claim.claim + 1)]
        pool = (good if held else rivalled or stale) or self.claims
        return pool[index % len(pool)]

    def _is_good(self, claim: Claim) -> bool:
        return self.oracle.jobs[claim.id].is_held_by(claim.claim)

    # Enqueue ----------------------------------------------------------------------------------------------------

    def enqueue(self, tenant, priority, delay, deadline, max_attempts, key, on_held):
        job = NewJob(
            "noop", tenant=tenant, priority=priority, delay_seconds=delay, max_attempts=max_attempts,
            deadline=None if deadline is None else timedelta(seconds=deadline), exclusive_key=key, on_held=on_held,
        )  # fmt: skip
        self._enqueue(job, deadline)

    def enqueue_with_an_idempotency_key(self, number, n, key, on_held):
        """An idempotency key returns its first job, before any policy of the exclusive key applies."""
        job = NewJob("noop", {"n": n}, idempotency_key=f"i{number}", exclusive_key=key, on_held=on_held)
        self._enqueue(job, None)

    def enqueue_many(self, count):
        jobs = [NewJob("noop") for _ in range(count)]
        enqueued = complete(self.queue.enqueue(complete(self.catalog.prepare(jobs))))
        for job, answer in zip(jobs, enqueued, strict=True):
            assert tuple(answer) == self.oracle.enqueue(self._row(job, None), 0.0)

    def _enqueue(self, job: NewJob, deadline: float | None) -> None:
        rows = complete(self.catalog.prepare([job]))
        expected = answer_of(
            lambda: self.oracle.enqueue(self._row(job, deadline), job.delay_seconds, job.on_held or "queue")
        )
        for _ in range(2):  # a doubtful enqueue is repeated with the same ids and changes nothing
            found = answer_of(lambda: tuple(complete(self.queue.enqueue(rows))[0]))
            assert found == expected
            if expected is Refused or job.on_held not in (None, "queue"):
                return
            expected = (expected[0], False)

    def _row(self, job: NewJob, deadline: float | None) -> Row:
        return Row(
            id=job.id, tenant=job.tenant, priority=5 if job.priority is None else job.priority,
            run_after=self.oracle.now, max_attempts=job.max_attempts or 3, payload=job.payload,
            deadline=None if deadline is None else self.oracle.now + timedelta(seconds=deadline),
            exclusive_key=job.exclusive_key, idempotency_key=job.idempotency_key,
        )  # fmt: skip

    # Claims -----------------------------------------------------------------------------------------------------

    def claim(self, worker, slots, freed):
        due = [job.id for job in self.oracle.due()]
        freed_keys = [("default", f'["{key}"]') for key in freed]
        claimed = complete(self.queue.claim(worker, LANES, BASIC.names(), slots, freed_keys=freed_keys)).jobs
        ids = [claim.id for claim in claimed]
        assert len(set(ids)) == len(ids) <= slots
        assert set(ids) <= set(due)
        if not freed:
            assert set(ids) == set(due[:slots])
        elif due:
            assert ids, "jobs are due and slots are free"
        self._take(claimed, worker)

    def claim_job(self, index, worker, suspect):
        id = self.a_job(index).id
        claim = complete(self.queue.claim_job(worker, id, BASIC.names(), suspect=suspect))
        assert (claim is not None) == self.oracle.can_claim(id, suspect)
        self._take([claim] if claim else [], worker)

    def _take(self, claimed: list[Claim], worker: str) -> None:
        for claim in claimed:
            self.oracle.claim(claim.id, worker)
            assert claim.claim == self.oracle.jobs[claim.id].claims
            assert claim.attempts == self.oracle.jobs[claim.id].attempts
            self.workers[claim.id, claim.claim] = worker
        self.claims.extend(claimed)

    def worker_of(self, claim: Claim) -> str:
        return self.workers[claim.id, claim.claim]

    def renew(self, indexes, lets_go):
        """Renew claims, valid or not, and release those whose jobs have ended."""
        claims = (self.claims[index % len(self.claims)] for index in indexes)
        held = {(claim.id, claim.claim) for claim in claims}
        assert complete(self.queue.renew(sorted(held))) == self.oracle.renew(held)
        if lets_go:
            complete(self.queue.let_go(sorted(held)))
            self.oracle.let_go(held)

    # Settles ----------------------------------------------------------------------------------------------------

    def settle(self, verbs):
        settles: dict[Any, tuple[Settle, float]] = {}
        for verb, index, held, delay in verbs:
            claim = self.a_claim(index, held=held)
            if verb == "retry" and claim.attempts >= claim.max_attempts:
                verb = "fail"
            settles.setdefault(claim.id, (Settle(verb, claim, values_of(verb, delay)), delay))
        for worker, another in (("w1", "w2"), ("w2", "w1")):
            own = [(one, delay) for one, delay in settles.values() if self.worker_of(one.claim) == worker]
            expected = [(one.claim.id, one.claim.claim, one.verb, delay) for one, delay in own]
            batch = [one for one, _ in own]
            assert complete(self.queue.settle(batch, another)) == set(), "another worker is fenced"
            assert complete(self.queue.settle(batch, worker)) == self.oracle.settle(expected)
            assert complete(self.queue.settle(batch, worker)) == set(), "the same settle is fenced the second time"

    def succeed_with(self, index, held, then):
        claim = self.a_claim(index, held=held)
        settle, worker = Settle("succeed", claim, values_of("succeed", 0.0)), self.worker_of(claim)
        jobs = [NewJob("noop") for _ in range(then)]
        rows = complete(self.catalog.prepare(jobs, before=claim))
        found = answer_of(lambda: complete(self.queue.succeed_with(settle, worker, write=None, then=rows)))
        moved = self.oracle.settle([(claim.id, claim.claim, "succeed", 0.0)])
        assert (found is None) == bool(moved)
        for job in jobs if moved else ():
            row = self._row(job, None)
            row.tenant = claim.tenant
            self.oracle.insert(row, 0.0)

    def wait(self, index, held, children, on_join, allow_failures):
        claim = self.a_claim(index, held=held)
        jobs = [NewJob("noop", max_attempts=one["max_attempts"], exclusive_key=one["key"]) for one in children]
        outcome = Wait(jobs, on_join=on_join, allow_failures=allow_failures)
        rows = complete(self.catalog.prepare(jobs, parent=claim))
        found = answer_of(lambda: complete(self.queue.wait(claim, self.worker_of(claim), outcome, rows)))
        offspring = [self._row(job, None) for job in jobs]
        for child in offspring:
            child.tenant, child.priority, child.deadline = claim.tenant, claim.priority, claim.deadline
        allowed = None if allow_failures is True else allow_failures
        assert found == answer_of(lambda: self.oracle.wait(claim.id, claim.claim, offspring, on_join, allowed))

    def emit(self, index, held, message):
        claim = self.a_claim(index, held=held)
        event = {"id": claim.id, "claim": claim.claim, "place": 1, "event": "x", "level": "info", "message": message}
        assert bool(complete(self.queue.emit([event]))) == self.oracle.emit(claim.id, claim.claim, message)

    def progress(self, index, held, current):
        rescued = [one for one in self.claims if self.oracle.jobs[one.id].rescues and self._is_good(one)]
        claim = rescued[index % len(rescued)] if held and rescued else self.a_claim(index, held=held)
        written = complete(self.queue.progress([(claim.id, claim.claim, current, None)]))
        assert bool(written) == self.oracle.progress(claim.id, claim.claim, current)

    # Verbs of people --------------------------------------------------------------------------------------------

    def cancel(self, indexes):
        ids = list({self.a_job(index).id for index in indexes})
        assert complete(self.queue.cancel(ids)) == self.oracle.cancel(ids)

    def free_by_hand(self, index, verb):
        """Recover or rerun a job, mostly one for which that seems possible."""
        jobs = list(self.oracle.jobs.values())
        locked = [job for job in jobs if job.locked_by is not None]
        ended = [job for job in jobs if job.status in ("FAILED", "CANCELLED")]
        likely = (locked if verb == "recover" else ended) or jobs
        id = likely[index % len(likely)].id
        found = answer_of(lambda: complete(getattr(self.queue, verb)(id)))
        assert found == answer_of(lambda: getattr(self.oracle, verb)(id))

    # Upkeep -----------------------------------------------------------------------------------------------------

    def rescue(self, deaths):
        claims = [self.a_claim(index, held=True) for index in deaths] if self.claims else []
        dead = [(claim.id, claim.claim) for claim in claims]
        rescued = complete(self.queue.rescue(dead=dead))
        assert {one.id: one.was_running for one in rescued} == self.oracle.rescue(dead)

    def expire(self):
        complete(self.queue.expire())
        self.oracle.expire()

    def advance(self, seconds):
        self.oracle.now += timedelta(seconds=seconds)

    # What must always hold --------------------------------------------------------------------------------------

    @invariant()
    def the_database_agrees(self):
        found = {row[0]: row for row in complete(self.database.rows(READ_JOBS))}
        assert set(found) == set(self.oracle.jobs), "a job was lost, or one appeared that was never enqueued"
        for id, row in found.items():
            expected = tuple(getattr(self.oracle.jobs[id], name) for name in COMPARED)
            assert dict(zip(COMPARED, row[2:], strict=True)) == dict(zip(COMPARED, expected, strict=True))
            assert row[1] == (row[2] not in OPEN)
        self._events_tell_the_same(found)
        self._keys_are_exclusive()
        self._counters_are_true()

    def _events_tell_the_same(self, found: dict[Any, tuple[Any, ...]]) -> None:
        for event, job, status, claim, attempt in complete(self.database.rows(READ_EVENTS, {"after": self.last_event})):
            assert event > self.last_event
            self.last_event = event
            told = self.events.setdefault(job, [])
            if status is not None:
                if told:
                    move = JobStatus(told[-1][0]), JobStatus(status)
                    assert allows(JOB, *move), f"the history has an illegal move {move}"
                    assert claim >= told[-1][1]
                told.append((status, claim, attempt))
        for id in found:
            job = self.oracle.jobs[id]
            assert self.events[id][0] == ("QUEUED", 0, 0)
            assert self.events[id][-1] == (job.status, job.claims, job.attempts), (
                "the history does not end in the status of the job"
            )
            started = sum(1 for before, after in zip(self.events[id], self.events[id][1:], strict=False)
                          if before[0] == "QUEUED" and after[0] == "RUNNING")  # fmt: skip
            assert started == job.claims, "each claim must be one start in the history"

    def _keys_are_exclusive(self) -> None:
        jobs = [job for job in self.oracle.jobs.values() if job.exclusive_key is not None]
        for chosen in ([j for j in jobs if j.is_current], [j for j in jobs if j.status == "RUNNING"]):
            assert all(n == 1 for n in Counter((job.tenant, job.exclusive_key) for job in chosen).values())

    def _counters_are_true(self) -> None:
        for job in self.oracle.jobs.values():
            assert 0 <= job.attempts <= job.max_attempts
            assert (job.children_open > 0) == (job.status == "RUNNING" and job.lease_until is None)
            if job.children_open:
                round = self.oracle.children_of(job.id, job.waits)
                assert job.children_open == sum(child.is_open for child in round)
                assert job.children_failed == sum(child.status in ("FAILED", "CANCELLED") for child in round)


def answer_of(call: Any) -> Any:
    """The result of a verb, or `Refused` if the database or the oracle refuses."""
    try:
        return call()
    except (Conflict, InvalidInput, Refused):
        return Refused


def values_of(verb: str, delay_seconds: float) -> dict[str, Any]:
    error = {"kind": "fatal", "code": "broken", "type": "Fatal", "message": "it broke"}
    return {
        "succeed": {"result": 1, "progress_current": None, "progress_total": None},
        "fail": {"error": error},
        "retry": {"error": error, "delay_seconds": delay_seconds},
        "snooze": {"delay_seconds": delay_seconds, "reason": None, "error_kind": None},
        "release": {"reason": "stop"},
    }[verb]


@pytest.mark.timeout(3600)
def test_random_verbs_agree_with_the_oracle(database_url):
    database = Blocking(DATABASE, database_url)
    profile = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if IS_LONG else [Phase.generate],
    )
    try:
        run_state_machine_as_test(lambda: Machine(database), settings=profile)
    finally:
        database.close()
