"""While no key exists, access is open on a loopback address, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest

from batchwright import AsyncBatchwright
from batchwright.access.gate import require_key
from batchwright.access.settings import ApiSettings
from batchwright.errors import ConfigurationError
from tests.api.conftest import OPERATIONS, Api, fails
from tests.support import DATABASE, make_settings


async def test_everything_is_open_on_loopback_until_the_first_key_is_created(api: Api) -> None:
    http = await api.client()
    assert (await http.post("/v1/jobs", json={"job_type": "echo"})).json()["tenant"] == "default"
    for path in ("/v1/jobs", "/v1/workers", "/metrics", "/v1/jobs?tenant=*"):
        assert (await http.get(path)).status_code == 200
    fails(await http.get("/v1/jobs", headers={"Authorization": "Bearer bw_x"}), 401, "unauthorized")
    placeholder = {"Authorization": "Bearer sk-none"}
    assert (await http.get("/v1/jobs", headers=placeholder)).status_code == 200
    elsewhere = await api.client(api.with_settings(host="192.0.2.1"), url="http://192.0.2.1")
    fails(await elsewhere.get("/v1/jobs"), 401, "unauthorized")
    key = await api.batchwright.keys.create("desk")
    fails(await http.get("/v1/jobs"), 401, "unauthorized")
    fails(await http.get("/v1/jobs", headers=placeholder), 401, "unauthorized")
    await api.batchwright.keys.revoke(key.key.id)
    fails(await http.get("/v1/jobs"), 401, "unauthorized")


async def test_without_a_key_the_server_does_not_start_on_other_addresses(database_url: str) -> None:
    settings = make_settings(
        database=dataclasses.replace(DATABASE, url=database_url), api=ApiSettings(port=0, host="0.0.0.0")
    )
    async with AsyncBatchwright(settings=settings, operations=OPERATIONS) as batchwright:
        with pytest.raises(ConfigurationError, match=r"not on 0\.0\.0\.0; .* batchwright key create"):
            await batchwright.server()
        for host in ("::", "192.0.2.1", "example.com", ""):
            with pytest.raises(ConfigurationError, match="batchwright key create"):
                await require_key(batchwright.keys, host=host, is_loopback=ApiSettings(host=host).is_loopback)
        for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
            await require_key(batchwright.keys, host=host, is_loopback=ApiSettings(host=host).is_loopback)
        await batchwright.keys.create("desk")
        await (await batchwright.server()).close()
