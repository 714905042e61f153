"""Entities named in a text: by patterns without a model, or by a model that answers under a schema."""
