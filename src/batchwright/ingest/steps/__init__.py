"""The steps that every document goes through; one file each."""
