"""One file for each provider; the folder is the registry."""
