"""Signed deliveries to endpoints of users."""
