"""Every exception Batchwright raises, in one tree.

BatchwrightError
├── ConfigurationError          a setting or the environment is wrong; the message says what to write
├── DatabaseError
│   ├── DatabaseUnavailable     refused, lost or restarting: the same call may succeed later
│   │   └── DatabaseBusy        it answers, but is slow or short of resources
│   ├── Deadlock                the database chose this transaction as a victim: repeat it
│   ├── DataRefused             a value that PostgreSQL cannot store
│   └── UniqueViolation         a unique index refused the row
├── StorageError                the object store refused, and would refuse again
│   ├── StorageFull             no room: the same call may succeed when there is some
│   └── StorageUnavailable      unreachable, or answers with errors: the same call may succeed later
├── InvalidInput                the caller's input is wrong; nothing was written
│   ├── UnknownOperation        no worker knows this job type
│   ├── PayloadInvalid          the payload does not have the shape its operation declares
│   └── TooLarge                a payload, result or list is over its limit
├── NotFound                    no such object, or not this tenant's
├── Unauthorized                no key, or one that is unknown, revoked or expired
├── Forbidden                   the key does not have the scope for this
├── Conflict                    the object is not in a state that allows this
│   └── Fenced                  another claim owns the job now: this worker may change nothing
├── JobFailed                   raised by wait(): the job ended FAILED
├── JobCancelled                raised by wait(): the job ended CANCELLED
├── BatchFailed                 raised by wait() and results() of a batch: it failed as a whole
├── WaitTimeout                 raised by wait(): the job, or the batch, is still open
├── WorkerBroken                raised by Worker.run(): the process must be restarted
├── RetryLater                  raised by an operation: put the job back, no attempt used
└── OperationError              raised by an operation: the class decides the reaction
    ├── RateLimited             wait, same step again, no attempt used
    ├── Transient               exponential backoff, up to max_attempts
    ├── SchemaInvalid           FAILED at once: same input, same output
    └── Fatal                   FAILED at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

_PROBLEMS_SHOWN = 3


class BatchwrightError(Exception):
    """Catch this to catch everything Batchwright raises."""


class ConfigurationError(BatchwrightError):
    """A setting or the environment is wrong; the message says what to write instead."""


class DatabaseError(BatchwrightError):
    """PostgreSQL refused a statement."""


class DatabaseUnavailable(DatabaseError):
    """The connection was refused or lost; it is unknown whether the last statement took effect."""


class DatabaseBusy(DatabaseUnavailable):
    """PostgreSQL answers, but a statement, a lock or a free connection took too long, or it is short of resources."""


class Deadlock(DatabaseError):
    """PostgreSQL rolled this transaction back to break a deadlock; repeating it is safe."""


class DataRefused(DatabaseError):
    """A value that PostgreSQL cannot store, such as a NUL character in a JSON string."""


class UniqueViolation(DatabaseError):
    """A unique index refused the row."""


class StorageError(BatchwrightError):
    """The object store refused, for example because of wrong credentials or a bucket that does not exist."""


class StorageFull(StorageError):
    """There is no room for the object; nothing of it was kept."""


class StorageUnavailable(StorageError):
    """The store could not be reached, or answered every try with an error of its own."""


class InvalidInput(BatchwrightError):
    """The caller's input is wrong; nothing was written."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownOperation(InvalidInput):
    """No worker has published an operation of this name."""


class PayloadInvalid(InvalidInput):
    """The payload does not have the shape that its operation declares."""


class TooLarge(InvalidInput):
    """A payload, a result or a list is over its limit, which the message names."""


class NotFound(BatchwrightError):
    """There is no such object, or it belongs to another tenant."""

    def __init__(self, message: str, *, kind: str | None = None, id: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """The kind of object, such as `batch`: for interfaces that have their own words for it."""
        self.id = id


class Unauthorized(BatchwrightError):
    """There is no key, or it is unknown, revoked or expired."""


class Forbidden(BatchwrightError):
    """The key does not have the scope that this needs."""


class Conflict(BatchwrightError):
    """The object is not in a state that allows this; the message names the state found and the states expected."""

    def __init__(self, message: str, *, holder: str | None = None) -> None:
        super().__init__(message)
        self.holder = holder


class Fenced(Conflict):
    """A newer claim owns the job: what this worker wanted to write was refused."""


class JobFailed(BatchwrightError):
    """The awaited job ended FAILED; `error` is what the job object shows."""

    def __init__(self, job_id: str, error: Mapping[str, Any]) -> None:
        super().__init__(f"job {job_id} failed: {error.get('code')}: {error.get('message')}")
        self.job_id = job_id
        self.error = dict(error)


class JobCancelled(BatchwrightError):
    """The awaited job ended CANCELLED."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} was cancelled")
        self.job_id = job_id


class BatchFailed(BatchwrightError):
    """The batch failed as a whole, e.g. because of its input; `problems` says why: `code`, `message`, `line`."""

    def __init__(self, batch_id: str, problems: Sequence[Mapping[str, Any]]) -> None:
        first = "; ".join(_describe_problem(problem) for problem in problems[:_PROBLEMS_SHOWN])
        more = f"; and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
        super().__init__(f"batch {batch_id} failed: {first or 'its files could not be written'}{more}")
        self.batch_id = batch_id
        self.problems = [dict(problem) for problem in problems]


def _describe_problem(problem: Mapping[str, Any]) -> str:
    where = f"line {problem['line']}: " if problem.get("line") is not None else ""
    return f"{where}{problem.get('message')}"


class WaitTimeout(BatchwrightError):
    """The awaited job or batch was still open at the timeout. It continues; the message says why it waits."""


class WorkerBroken(BatchwrightError):
    """A worker found its own state inconsistent. It has released its jobs; restart the process."""


class RetryLater(BatchwrightError):
    """Raised by an operation that cannot run now: the job returns to the queue and uses no attempt.

    >>> raise RetryLater("GPU busy", delay_seconds=60)
    """

    def __init__(self, reason: str, delay_seconds: float = 60.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_seconds = delay_seconds


class OperationError(BatchwrightError):
    """Base class of the errors that an operation raises to report a failure."""

    kind: ClassVar[str] = "fatal"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class RateLimited(OperationError):
    """The called service limits the rate: the job waits and uses no attempt."""

    kind = "rate_limited"

    def __init__(self, message: str = "", *, retry_after: float | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Transient(OperationError):
    """It may work next time: retried with exponential backoff, up to `max_attempts`."""

    kind = "transient"


class SchemaInvalid(OperationError):
    """The answer or the input has the wrong shape; the same input would fail the same way."""

    kind = "schema_invalid"


class Fatal(OperationError):
    """Retrying cannot help; `scope` says what else fails with it."""

    kind = "fatal"

    def __init__(
        self,
        message: str = "",
        *,
        scope: Literal["item", "job", "credential"] = "job",
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.scope = scope
