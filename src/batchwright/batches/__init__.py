"""OpenAI batches on the user's own model servers."""
