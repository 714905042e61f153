"""What the benchmarks share: a server of their own, CPU accounting, and the report."""
