"""Signed deliveries to users' endpoints."""
