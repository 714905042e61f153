"""From a shard to answers: the order of requests, the requests in flight, and the life of a shard."""
