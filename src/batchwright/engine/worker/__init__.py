"""The worker process: it claims jobs, runs them under a lease, and settles them."""
