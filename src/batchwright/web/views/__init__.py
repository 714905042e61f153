"""The pages of the engine."""
