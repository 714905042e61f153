"""Keys: made once, never stored in clear, and refused as soon as they expire or are revoked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from batchwright.access.keys import Scope
from batchwright.errors import InvalidInput, NotFound
from tests.api.conftest import Api, fails


async def test_a_keys_secret_is_nowhere_in_the_database(api: Api) -> None:
    key = await api.batchwright.keys.create("desk")
    http = await api.client(Authorization=f"Bearer {key.secret}")
    assert (await http.post("/v1/jobs", json={"job_type": "echo"})).status_code == 201
    tables = await api.sql(
        "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'batchwright'"
    )
    for (table,) in tables:
        found = await api.sql(f"SELECT FROM {table} AS one WHERE one::text LIKE %(secret)s", secret=f"%{key.secret}%")
        assert found == [], table
    ((digest, hint),) = await api.sql("SELECT digest, hint FROM batchwright.api_key")
    assert len(bytes(digest)) == 32
    assert key.secret.startswith(hint)
    assert len(key.secret) - len(hint) > 32


async def test_a_key_that_is_unknown_malformed_or_of_another_kind_is_refused(api: Api) -> None:
    secret = (await api.batchwright.keys.create("desk")).secret
    wrong = [
        "Bearer bw_unknown",
        f"Bearer {secret[:-1]}",
        f"Bearer {secret}x",
        f"Bearer {secret.upper()}",
        f"Basic {secret}",
        secret,
        "Bearer",
        "Bearer ",
        "",
        "Bearer bw_\xff",
        "Bearer x" + "y" * 5000,
    ]
    for authorization in wrong:
        http = await api.client()
        answer = await http.get("/v1/jobs", headers={"Authorization": authorization.encode("latin-1")})
        fails(answer, 401, "unauthorized")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):
        http = await api.client(Authorization=f"{scheme} {secret}")
        assert (await http.get("/v1/jobs")).status_code == 200


async def test_a_key_expires_when_its_time_is_over(api: Api) -> None:
    holder = await api.holder(lifetime=timedelta(hours=1))
    assert (await holder.get("/v1/jobs")).status_code == 200
    await api.sql("UPDATE batchwright.api_key SET expires_at = now()")
    fails(await holder.get("/v1/jobs"), 401, "unauthorized")


async def test_a_revoked_key_is_refused_at_once(api: Api) -> None:
    key = await api.batchwright.keys.create("desk")
    http = await api.client(Authorization=f"Bearer {key.secret}")
    assert (await http.get("/v1/jobs")).status_code == 200
    revoked = await api.batchwright.keys.revoke(key.key.id)
    fails(await http.get("/v1/jobs"), 401, "unauthorized")
    assert (await api.batchwright.keys.revoke(key.key.id)).revoked_at == revoked.revoked_at
    fails(await (await api.client()).get("/v1/jobs"), 401, "unauthorized")
    with pytest.raises(NotFound, match="batchwright key list"):
        await api.batchwright.keys.revoke(uuid4())


async def test_the_last_use_of_a_key_is_noted_once_a_minute(api: Api) -> None:
    holder = await api.holder()
    (before,) = await api.batchwright.keys.list()
    assert before.last_used_at is None
    await holder.get("/v1/jobs")
    (used,) = await api.batchwright.keys.list()
    assert used.last_used_at is not None
    await holder.get("/v1/jobs")
    assert await api.batchwright.keys.list() == [used]
    await api.sql("UPDATE batchwright.api_key SET last_used_at = last_used_at - interval '61 seconds'")
    await holder.get("/v1/jobs")
    ((later,),) = await api.sql("SELECT last_used_at FROM batchwright.api_key")
    assert later > used.last_used_at


async def test_keys_are_checked_when_they_are_made(api: Api) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": ""}, "1 to 100"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"tenant": ""}, "1 to 100"),
        ({"tenant": "*"}, "all tenants"),
        ({"scopes": []}, "at least one scope"),
        ({"scopes": ["red"]}, "no scope 'red'; use read, submit, operate, admin"),
        ({"lifetime": timedelta(0)}, "must be more than 0"),
        ({"lifetime": timedelta(days=40_000)}, "100 years"),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            await api.batchwright.keys.create(**{"name": "desk", **options})
    assert await api.batchwright.keys.list() == []
    made = await api.batchwright.keys.create("desk", scopes=["read", "read", Scope.ADMIN], tenant="t")
    assert made.key.scopes == (Scope.READ, Scope.ADMIN)
    assert await api.batchwright.keys.list(tenant="t") == [made.key]
    assert await api.batchwright.keys.list(tenant="u") == []
