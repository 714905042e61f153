"""HTTP: one face for people and programs, over the same verbs as the client and the command line."""
