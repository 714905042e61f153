from batchwright.states import JobStatus
from tests.support import event_names, finished, put_one, succeed, take_one, working


async def test_claim_and_succeed_write_their_events(queue):
    id = await put_one(queue, payload={"n": 1})
    claim = await take_one(queue)
    assert claim.id == id
    assert await succeed(queue, claim, 7)
    assert (await queue.get(id)).status is JobStatus.SUCCEEDED
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.succeeded"]


async def test_a_worker_runs_what_was_enqueued(queue, pool):
    async with working(pool):
        id = await put_one(queue, payload={"n": 3})
        assert (await finished(queue, id)).result == 3
