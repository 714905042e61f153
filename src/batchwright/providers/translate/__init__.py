"""Translates OpenAI's chat requests into other providers' formats, and their answers back: pure functions.

A field without a counterpart is refused by name, so that no request silently changes its meaning. A value that changes
nothing, such as `n: 1`, is accepted.
"""
