"""The work folder: what many shards that begin at once do to each other."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from batchwright.batches.journal.workspace import Workspace


async def test_shards_that_prepare_one_batch_at_once_do_not_take_each_others_threads(tmp_path):
    """Whoever was at it needed a thread, and all of them waited for him."""
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
