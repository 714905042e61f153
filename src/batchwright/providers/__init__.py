"""Batch tasks that outside providers run: speech and completions are sent once, polled, and fetched."""
