"""`batchwright demo`: real work on this machine, with a worker that is killed halfway through."""
