"""The contestants of `make bench-queue`, one module each, all with the command line of `base`."""
