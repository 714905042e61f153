"""Attacks on the HTTP server, all at once, beside an honest client."""
