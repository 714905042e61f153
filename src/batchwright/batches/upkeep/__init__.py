"""What upkeep does for batches: a watchdog and the garbage collector."""
