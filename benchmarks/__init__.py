"""Benchmarks: one module per `make bench-NAME`."""
