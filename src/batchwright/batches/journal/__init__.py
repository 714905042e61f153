"""Answers on disk: the journal, its checkpoints, and where its segments are."""
