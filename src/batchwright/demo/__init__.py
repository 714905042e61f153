"""`batchwright demo`: the main job on this machine, with a worker killed in the middle."""
