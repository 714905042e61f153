"""Chat requests of OpenAI's shape in other providers' shapes, and their answers back: pure functions.

What has no counterpart is refused by name, so that no request quietly means something else. A value that changes
nothing, such as `n: 1`, is accepted.
"""
