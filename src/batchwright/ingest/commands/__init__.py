"""Command-line commands for documents."""
