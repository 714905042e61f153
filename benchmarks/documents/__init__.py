"""The sections of `make bench-ingest`; see benchmarks/tools/sections.py for what a section is."""
