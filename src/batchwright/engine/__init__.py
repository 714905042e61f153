"""The engine: jobs, the verbs that move them, the worker that runs them, and upkeep."""
