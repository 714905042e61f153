"""Servers that kill themselves while they answer one request: `python -m tests.files.doomed BRIEFS`.

The briefs are a JSON list. Each has `url` and `folder` of the database and the files, `path` and `request` of a POST,
and `at` and `when` as in tests.batches.doomed. Each runs in its own process, which is
forked so that imports are done only once. Prints how each process ended, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from batchwright import AsyncBatchwright
from tests.api.conftest import Api, configured
from tests.batches.doomed import doom


async def answer(brief: dict[str, Any]) -> None:
    settings = configured(brief["url"], Path(brief["folder"]))
    async with AsyncBatchwright(settings=settings) as batchwright:
        server = await batchwright.server()
        http = await Api(batchwright, server._services).client()
        doom(brief["at"], brief["when"], 1)
        await http.post(brief["path"], **brief["request"])
    os._exit(0)


def ended(brief: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        asyncio.run(answer(brief))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.stdout.write(json.dumps([ended(brief) for brief in json.loads(sys.argv[1])]))
