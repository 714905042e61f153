"""The engine's own part: jobs, queues, schedules, workers and keys use the same interface as every other part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.part import Command, Part

if TYPE_CHECKING:
    from batchwright.engine.worker.duty import Duty, Site

_CLI = "batchwright.cli.commands"


class EnginePart(Part):
    """Jobs and everything related to them; schedules and retention are upkeep rounds."""

    name = "engine"
    routers = ("batchwright.api.jobs:router", "batchwright.api.schedules:router", "batchwright.api.system:router")
    commands = {
        "up": Command(f"{_CLI}.serve:up", "Start the database, the HTTP server and workers.", "Start"),
        "demo": Command(
            "batchwright.demo.command:demo", "Run a batch, kill a worker, and show that nothing is lost.", "Start"
        ),
        "check": Command(f"{_CLI}.check:check", "Check the settings, the database and the workers.", "Start"),
        "simulate": Command(f"{_CLI}.simulate:simulate", "Run a simulated model server.", "Start"),
        "job": Command(f"{_CLI}.jobs:app", "Submit, watch, cancel and rerun jobs.", "Jobs"),
        "pipeline": Command(f"{_CLI}.pipelines:app", "Show and cancel a job with all its descendants.", "Jobs"),
        "schedule": Command(f"{_CLI}.schedules:app", "Create jobs at the times of a cron expression.", "Jobs"),
        "inbox": Command(f"{_CLI}.inbox:app", "List failed jobs by cause; rerun or dismiss them.", "Jobs"),
        "operations": Command(f"{_CLI}.workers:operations", "List the operations that workers offer.", "Jobs"),
        "worker": Command(f"{_CLI}.serve:worker", "Run workers on a database that is up and migrated.", "Operate"),
        "api": Command(f"{_CLI}.serve:api", "Run the HTTP server on a database that is up.", "Operate"),
        "migrate": Command(f"{_CLI}.migrate:migrate", "Migrate the database schema to this version.", "Operate"),
        "queue": Command(f"{_CLI}.queues:app", "List, pause and resume queues.", "Operate"),
        "workers": Command(f"{_CLI}.workers:workers", "List worker processes and their state.", "Operate"),
        "key": Command(f"{_CLI}.keys:app", "Create, list and revoke keys of the HTTP API.", "Operate"),
    }

    def work(self, site: Site) -> Duty:
        from batchwright.engine.retention import Retention
        from batchwright.engine.worker.duty import Duty

        retention = Retention(site.queue.database, self.core.settings.retention)
        return Duty(rounds=[*self.core.schedules.rounds(), *retention.rounds()])
