"""The commands of the engine: jobs and what stands around them."""
