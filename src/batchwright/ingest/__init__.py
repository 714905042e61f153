"""Documents: from bytes of any supported format to canonical text and chunks."""
