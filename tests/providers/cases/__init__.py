"""One file for each provider that the conformance suite runs over: what it needs to be set up against the server.

A module has `CASES`, a list of `Case`; the suite finds it by itself.
"""
