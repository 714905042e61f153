"""Sections about many workers on one PostgreSQL."""
