"""What the benchmarks share: a server of their own, processor accounting, and the report."""
