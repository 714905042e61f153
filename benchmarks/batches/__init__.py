"""The sections of `make bench-batch`, one module each.

A section has NAME, TITLE, SECONDS_MAX, `measure(ground)` for its figures, `tables(figures)` for people, and
`goals(figures)`, which without figures names the same goals as not measured.
"""
