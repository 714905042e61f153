"""Stored files: what users upload, and what batches write."""
