"""The command line of tasks and providers."""
