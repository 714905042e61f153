"""Protocols that several providers speak."""
