"""HTTP: one interface for people and programs, with the same verbs as the client and the command line."""
