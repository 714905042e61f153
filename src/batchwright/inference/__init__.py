"""Sending requests to model servers: the one HTTP client, gateways, and limits that adapt."""
