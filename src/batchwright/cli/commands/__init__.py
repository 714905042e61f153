"""The commands of the engine: jobs, queues, schedules, workers and keys."""
