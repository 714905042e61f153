"""`python -m batchwright` is `batchwright`."""

from batchwright.cli import main

main()
