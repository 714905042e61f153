"""The engine: jobs, the verbs that change their state, the worker that runs them, and upkeep."""
