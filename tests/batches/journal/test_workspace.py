"""The work folder, when many shards begin at the same time."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from batchwright.batches.journal.workspace import Workspace


async def test_shards_that_prepare_one_batch_at_the_same_time_do_not_block_each_other(tmp_path):
    """The shard that prepares needs a thread; shards that wait for it must not hold all of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=2))
    workspaces = [Workspace(tmp_path / "work", 1 << 30) for _ in range(2)]
    at_it, most = 0, 0

    async def prepare(workspace):
        nonlocal at_it, most
        with workspace.use("batch_1"):
            async with workspace._preparing("batch_1"):
                at_it, most = at_it + 1, max(most, at_it + 1)
                await asyncio.to_thread(lambda: None)
                at_it -= 1

    async with asyncio.timeout(20):
        await asyncio.gather(*(prepare(workspaces[n % 2]) for n in range(8)))
    assert most == 1
