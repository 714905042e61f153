"""Tests of `compute_embeddings`."""
