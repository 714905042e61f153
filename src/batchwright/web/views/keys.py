"""API keys: who may do what; a new one is shown once."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from starlette.responses import Response

from batchwright.access.keys import DEFAULT_SCOPES, ApiKey, Scope
from batchwright.errors import InvalidInput
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Admin

pages = Pages(
    "keys", package="batchwright.web", links=[Link("Keys", "/ui/keys", group="Access", order=10, scope=Scope.ADMIN)]
)

_SHOWN = 80
_LIFETIME = re.compile(r"(\d{1,6})\s*([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_MEANINGS = {
    Scope.READ: "see jobs, batches, files and this dashboard",
    Scope.SUBMIT: "submit jobs, upload files, create and control batches",
    Scope.OPERATE: "cancel, rerun and dismiss jobs, change schedules",
    Scope.ADMIN: "see workers, pause queues, manage keys, act in other tenants",
}


@pages.get("/ui/keys")
async def list_keys(visit: Admin) -> Response:
    keys, tenant = visit.services.core.keys, visit.tenant
    is_all = "tenant" not in visit.request.query_params

    async def load() -> dict[str, Any]:
        return _newest(await keys.list(tenant=None if is_all else tenant))

    return await visit.show("keys.html", load, title="Keys", **_form(tenant or ""))


@pages.post("/ui/keys")
async def create_key(visit: Admin) -> Response:
    """The response shows the key itself; it is never shown again. Sent twice, the form makes one key."""
    form = await visit.form()
    given = {name: await visit.field(name) for name in ("name", "for_tenant", "lifetime")}
    scopes = [str(scope) for scope in form.getlist("scope")]
    keys = visit.services.core.keys
    try:
        tenant = given["for_tenant"] or visit.caller.own_tenant
        once = await visit.once()
        made = await keys.create(
            given["name"],
            tenant=tenant,
            scopes=scopes,
            lifetime=_lifetime(given["lifetime"]),
            id=None if once is None else UUID(once[:32]),
        )
    except InvalidInput as error:
        context = {**_form(given["for_tenant"], scopes, given, str(error)), **_newest(await keys.list())}
        return visit.draw("keys.html", status=400, title="Keys", **context)
    visit.site.live.forget()
    return visit.draw("key_created.html", title="Key created", made=made)


@pages.post("/ui/keys/{id}/revoke")
async def revoke_key(visit: Admin, id: UUID) -> Response:
    key = await visit.services.core.keys.revoke(id)
    return visit.go("/ui/keys", done=f"The key {key.name} was revoked. Its sessions have ended too.")


def _newest(keys: list[ApiKey]) -> dict[str, Any]:
    """Keys that are not revoked first, each group with its newest first."""
    first = sorted(keys, key=lambda key: (key.revoked_at is None, key.created_at), reverse=True)
    return {"keys": first[:_SHOWN], "more": max(0, len(keys) - _SHOWN)}


def _form(
    tenant: str, scopes: list[str] | None = None, given: dict[str, str] | None = None, problem: str | None = None
) -> dict[str, Any]:
    return {
        "meanings": _MEANINGS,
        "given": {"name": "", "lifetime": "", **(given or {}), "for_tenant": tenant},
        "chosen": [scope.value for scope in DEFAULT_SCOPES] if scopes is None else scopes,
        "problem": problem,
        "moment": datetime.now(UTC),
    }


def _lifetime(text: str) -> timedelta | None:
    if not text:
        return None
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is not a duration; write 30m, 12h or 90d", param="lifetime")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
