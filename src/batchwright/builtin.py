"""The engine's own part: jobs, queues, schedules, workers and keys come through the same door as everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.part import Command, Part

if TYPE_CHECKING:
    from batchwright.engine.worker.duty import Duty, Site

_CLI = "batchwright.cli.commands"


class EnginePart(Part):
    """Jobs and what stands around them; schedules and retention are rounds of upkeep."""

    name = "engine"
    routers = ("batchwright.api.jobs:router", "batchwright.api.schedules:router", "batchwright.api.system:router")
    commands = {
        "up": Command(f"{_CLI}.serve:up", "Start everything: the database, its schema, the HTTP server and workers."),
        "worker": Command(f"{_CLI}.serve:worker", "Run workers on a database that is up and migrated."),
        "api": Command(f"{_CLI}.serve:api", "Run the HTTP server on a database that is up and migrated."),
        "migrate": Command(f"{_CLI}.migrate:migrate", "Bring the database's schema up to this version."),
        "check": Command(f"{_CLI}.check:check", "Check the configuration, the database and the workers."),
        "demo": Command("batchwright.demo.command:demo", "Run a batch, kill a worker, and show that nothing is lost."),
        "simulate": Command(f"{_CLI}.simulate:simulate", "Run a simulated model server."),
        "operations": Command(f"{_CLI}.workers:operations", "List the operations that workers have published."),
        "workers": Command(f"{_CLI}.workers:workers", "List worker processes with their last sign of life."),
        "job": Command(f"{_CLI}.jobs:app", "Submit, watch, cancel and rerun jobs."),
        "pipeline": Command(f"{_CLI}.pipelines:app", "Show and cancel pipelines: a job with all jobs that came of it."),
        "queue": Command(f"{_CLI}.queues:app", "List, pause and resume queues."),
        "inbox": Command(f"{_CLI}.inbox:app", "List failed jobs by type and cause; rerun or dismiss them."),
        "key": Command(f"{_CLI}.keys:app", "Create, list and revoke keys of the HTTP API."),
        "schedule": Command(f"{_CLI}.schedules:app", "Create and manage schedules, which make jobs by the clock."),
    }

    def work(self, site: Site) -> Duty:
        from batchwright.engine.retention import Retention
        from batchwright.engine.worker.duty import Duty

        retention = Retention(site.queue.database, self.core.settings.retention)
        return Duty(rounds=[*self.core.schedules.rounds(), *retention.rounds()])
