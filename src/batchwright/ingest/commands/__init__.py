"""The command line of documents."""
