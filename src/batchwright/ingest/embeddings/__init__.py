"""`compute_embeddings`: vectors for every row of a file or a table, in batches, with one result file."""
