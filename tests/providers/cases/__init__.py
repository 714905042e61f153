"""One file for each provider of the conformance suite: how it is set up with the contract server.

Each module has `CASES`, a list of `Case`, which the suite finds.
"""
