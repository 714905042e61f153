"""From an input file to a plan: checked lines in prefix order, cut into shards."""
