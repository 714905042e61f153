"""From answers to files: assembled in input order, verified, repaired, read while a batch runs."""
