"""Batch tasks that outside providers run: speech and completions, sent once, polled, and brought home."""
