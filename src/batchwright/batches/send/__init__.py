"""From a shard to answers: whose turn it is, the requests in flight, and the life of a shard."""
