"""What only Mistral does: jobs with a model, and its own names of statuses."""

import json

import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid
from batchwright.providers.contract import Cancelled, Counts, Ending, InDoubt, Job, Phase
from tests.providers.support import telling

JOB = Job(external_id="job-1")


@pytest.fixture
async def mistral():
    async with telling("mistral", timeout_hours=30) as told:
        yield told


@pytest.mark.parametrize(
    ("raw", "phase", "ending"),
    [
        ("QUEUED", Phase.QUEUED, None),
        ("RUNNING", Phase.RUNNING, None),
        ("CANCELLATION_REQUESTED", Phase.CANCELLING, None),
        ("SUCCESS", Phase.ENDED, Ending.PARTIAL),
        ("FAILED", Phase.ENDED, Ending.FAILED),
        ("TIMEOUT_EXCEEDED", Phase.ENDED, Ending.EXPIRED),
        ("CANCELLED", Phase.ENDED, Ending.CANCELLED),
        ("MEDITATING", Phase.RUNNING, None),
    ],
)
async def test_every_status_is_mapped(mistral, raw, phase, ending):
    said = {"status": raw, "total_requests": 2, "succeeded_requests": 1, "failed_requests": 1, "output_file": "o"}
    mistral.say("/v1/batch/jobs/job-1", {**said, "errors": [{"message": "why", "count": 1}]})
    status = await mistral.adapter.poll(JOB)
    assert (status.phase, status.ending, status.found) == (phase, ending, {"output_file": "o"})
    assert status.counts == Counts(total=2, succeeded=1, failed=1)
    assert (status.error and status.error["message"]) == ("why" if ending is Ending.FAILED else None)


async def test_the_model_is_sent_with_the_job_and_not_in_the_lines(mistral):
    mistral.say("/v1/files", {"id": "file-1"})
    mistral.say("/v1/batch/jobs", {"id": "job-1"})
    request = mistral.chat("a")
    (staged,) = [one async for one in mistral.adapter.stage(request, {})]
    await mistral.adapter.submit(request, staged)
    (_, upload), (_, create) = mistral.sent
    (line,) = [json.loads(part) for part in upload.decode().splitlines() if part.startswith("{")]
    assert line == {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hello"}]}}
    assert create == {
        "input_files": ["file-1"],
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "metadata": {"bw_key": "bw-1"},
        "timeout_hours": 30,
    }
    assert [one.param for one in mistral.adapter.validate(mistral.chat("a", model=None))] == ["model"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [("429 No", RateLimited), ("422 No", SchemaInvalid), ("401 No", Fatal), ("502 No", InDoubt)],
)
async def test_a_refused_submission_has_its_class(mistral, status, kind):
    mistral.say("/v1/batch/jobs", {"object": "error", "message": "m", "type": "t", "code": None}, status)
    with pytest.raises(kind) as caught:
        await mistral.adapter.submit(mistral.chat("a"), {"input_file_id": "f"})
    assert type(caught.value) is kind


async def test_a_job_that_ended_before_it_could_be_cancelled_says_so(mistral):
    mistral.say("/v1/batch/jobs/job-1/cancel", {"status": "SUCCESS"})
    assert await mistral.adapter.cancel(JOB) is Cancelled.ENDED_ALREADY
    mistral.say("/v1/batch/jobs/job-1/cancel", {"status": "CANCELLATION_REQUESTED"})
    assert await mistral.adapter.cancel(JOB) is Cancelled.REQUESTED
