"""`batchwright migrate`."""

from __future__ import annotations

from pathlib import Path

import typer

from batchwright.app import AsyncBatchwright
from batchwright.cli.flags import Config, DatabaseUrl, Json, run, settings_from
from batchwright.cli.show import print_json
from batchwright.db.migrate import Migration
from batchwright.telemetry.logs import configure_logs


def migrate(database_url: DatabaseUrl = None, config: Config = None, json: Json = False) -> None:
    """Migrate the database schema to this version. Several runs at once are safe: only one of them migrates."""
    applied = run(_migrate(database_url, config))
    if json:
        print_json({"applied": [f"{one.number:04d}_{one.name}" for one in applied]})
    elif applied:
        for one in applied:
            typer.echo(f"applied {one.number:04d}_{one.name}")
    else:
        typer.echo("nothing to do: the schema is current")


async def _migrate(database_url: str | None, config: Path | None) -> list[Migration]:
    settings = settings_from(database_url, config)
    configure_logs("ERROR", settings.log.form)
    batchwright = await AsyncBatchwright(settings=settings).open(migrated=False)
    try:
        return await batchwright.migrate()
    finally:
        await batchwright.close()
