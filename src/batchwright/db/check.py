"""Checks whether Batchwright can use this database; each problem comes with a remedy."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from batchwright.db.database import LEASE_URL, PER_WORKER, DatabaseSettings, Pool, Session, Source, session_settings
from batchwright.db.migrate import pending
from batchwright.db.sessions import Route
from batchwright.db.statements import statements
from batchwright.errors import ConfigurationError, DatabaseUnavailable
from batchwright.private import is_open_to_others

SQL = statements(__package__, "check.sql")

_CLOCK_SECONDS_MAX = 5.0
_ENTER = stat.S_IXGRP | stat.S_IXOTH
_OLD_TRANSACTION_SECONDS = 300.0


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: what was checked, what was found, and the remedy for a problem."""

    name: str
    level: Level
    text: str
    remedy: str | None = None


def describe(url: str) -> str:
    """A URL or a list of libpq keywords without the password, safe to show."""
    parts = _read_url(url)
    user = f"{parts['user']}@" if parts.get("user") else ""
    return f"postgresql://{user}{_servers(parts)}/{parts.get('dbname', '')}"


def has_password(url: str) -> bool:
    return bool(_read_url(url).get("password"))


def _read_url(url: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        # The driver's message quotes the URL with its password.
        raise ConfigurationError(
            "the database's URL cannot be read; write it as postgresql://user:password@host:5432/database"
        ) from error


def _servers(parts: Mapping[str, Any]) -> str:
    """Each host with its port; a single port applies to all hosts."""
    hosts = str(parts.get("host") or "localhost").split(",")
    ports = str(parts.get("port") or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    return ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))


def explained(error: DatabaseUnavailable) -> DatabaseUnavailable:
    """The same failure, with a remedy if the server's message shows the cause."""
    text = _one_line(error)
    url = "BATCHWRIGHT_DATABASE_LEASE_URL" if text.startswith(LEASE_URL) else "BATCHWRIGHT_DATABASE_URL"
    remedies = {
        "Connection refused": f"start the server, or correct host and port in {url}",
        "No such file or directory": f"start the server, or correct the host in {url}",
        "resolve host": f"correct the host in {url}",
        "translate host name": f"correct the host in {url}",
        "password": f"correct user and password in {url}",
        "does not exist": f"create it (createdb, createuser), or correct {url}",
        "no more connections allowed": "raise max_client_conn of the pooler, or run fewer workers",
        "too many": "raise max_connections, or run fewer workers",
    }
    for sign, remedy in remedies.items():
        if sign in text:
            return DatabaseUnavailable(f"{text}; {remedy}")
    return DatabaseUnavailable(text)


def check_folder(setting: str, folder: Path) -> list[Finding]:
    """A warning if other users can look into one of our folders; nothing if it is private or does not exist yet."""
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
        is_reached = all(parent.stat().st_mode & _ENTER for parent in folder.resolve().parents)
    except OSError:
        return []
    if not is_reached or not is_open_to_others(mode):
        return []
    text = f"other users can look into {folder} ({setting}, mode {mode:04o}); what Batchwright creates there is private"
    return [Finding("folder", Level.WARNING, text, f"run: chmod 700 {shlex.quote(str(folder))}")]


async def check_database(
    pool: Pool,
    settings: DatabaseSettings,
    *,
    leases: Route | None = None,
    processes: int = 1,
    old_seconds: float = _OLD_TRANSACTION_SECONDS,
) -> list[Finding]:
    """Server, schema, session settings, connections, clock and old transactions; `leases` is the route of leases."""
    began = datetime.now(UTC)
    ((number, version, is_standby, clock),) = await pool.rows(SQL["server"])
    now = began + (datetime.now(UTC) - began) / 2
    wanted = session_settings(settings)
    ((found, role, may_create, name),) = await pool.rows(SQL["session"], {"names": list(wanted)})
    ((available, others),) = await pool.rows(SQL["connections"])
    needed = _needed(settings, pool.route, leases or pool.route, processes)
    return [
        _server(number, version, is_standby),
        await _schema(pool, may_create, name, role),
        _session_settings(settings, pool.route, found, f"{role} IN DATABASE {name}"),
        _connections(settings, needed, available, others),
        _clock((now - clock).total_seconds()),
        await _oldest_xmin(pool, old_seconds),
    ]


def _server(number: int, version: str, is_standby: bool) -> Finding:
    if number < 150000:
        return Finding("server", Level.ERROR, f"PostgreSQL {version}", "upgrade it to PostgreSQL 15 or newer")
    if is_standby:
        text = f"PostgreSQL {version}, a standby that accepts no writes"
        remedy = "connect to the primary; with several hosts in the URL, add target_session_attrs=read-write"
        return Finding("server", Level.ERROR, text, remedy)
    return Finding("server", Level.OK, f"PostgreSQL {version}")


async def _schema(database: Source, may_create: bool, name: str, role: str) -> Finding:
    missing = await pending(database)
    if not missing:
        return Finding("schema", Level.OK, "current")
    text = f"{len(missing)} migration(s) behind (next: {missing[0].number:04d}_{missing[0].name})"
    if not may_create and missing[0].number == 1:
        grant = f"GRANT CREATE ON DATABASE {name} TO {role}"
        return Finding(
            "schema", Level.ERROR, text, f"let the role create the schema ({grant}), run: batchwright migrate"
        )
    return Finding("schema", Level.ERROR, text, "run: batchwright migrate")


def _session_settings(settings: DatabaseSettings, route: Route, found: Mapping[str, str], role: str) -> Finding:
    """Our settings that are not in force. Plan settings do not matter if no statement stays prepared."""
    wanted = session_settings(settings)
    missing = {name: value for name, value in wanted.items() if found[name] != value}
    if not route.prepares:
        missing.pop("plan_cache_mode", None)
    if not missing:
        return Finding("session", Level.OK, f"timeouts of {settings.statement_timeout_seconds:g} s are in force")
    listed = ", ".join(f"{name} (it is {found[name]}, not {value})" for name, value in missing.items())
    text = f"a pooler ignores the startup parameter `options`, so these are not in force: {listed}"
    sql = " ".join(f"ALTER ROLE {role} SET {name} = '{value}';" for name, value in missing.items())
    remedy = (
        f"if no other program uses this role in this database, then RECONNECT the pooler: {sql} Otherwise give the "
        "pool a connect_query, or connect to PostgreSQL directly (docs/operating.md, Poolers and standbys)"
    )
    return Finding("session", Level.WARNING, text, remedy)


@dataclass(frozen=True, slots=True)
class _Needed:
    """Maximum number of connections that workers use: direct ones to the server, and those to a pooler."""

    processes: int
    own: int
    lent: int


def _needed(settings: DatabaseSettings, statements: Route, leases: Route, processes: int) -> _Needed:
    own = lent = 0
    if statements.keeps_sessions:
        own += settings.pool_size
    else:
        lent += settings.pool_size
    if leases.keeps_sessions:
        own += PER_WORKER
    else:
        lent += 1  # there is no doorbell
    return _Needed(processes, processes * own, processes * lent)


def _connections(settings: DatabaseSettings, needed: _Needed, available: int, others: int) -> Finding:
    text = (
        f"{needed.processes} worker process(es) use up to {needed.own} of {available}, other programs use {others} now"
    )
    if needed.lent:
        text += f"; up to {needed.lent} of the pooler's (max_client_conn), which lends them default_pool_size"
    if needed.own <= (free := available - others):
        return Finding("connections", Level.OK, text)
    remedy = f"raise max_connections by {needed.own - free}, or lower database.pool_size ({settings.pool_size})"
    return Finding("connections", Level.WARNING, text, remedy)


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= _CLOCK_SECONDS_MAX:
        return Finding("clock", Level.OK, f"differs by {abs(ahead):.1f} s from the database's")
    text = f"this machine is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the database"
    return Finding("clock", Level.WARNING, text, "synchronize both with a time server; jobs use the database's clock")


async def _oldest_xmin(session: Session, old_seconds: float) -> Finding:
    rows = await session.rows(SQL["oldest_xmin"], {"seconds": old_seconds})
    if not rows:
        return Finding("vacuum", Level.OK, "no old transaction prevents the removal of dead rows")
    holder, since, remedy = rows[0]
    when = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""
    return Finding(
        "vacuum", Level.WARNING, f"the oldest xmin is held by {holder}{when}: dead rows cannot be removed", remedy
    )


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
