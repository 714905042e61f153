"""`python -m batchwright` is `batchwright`."""

from batchwright.commands import main

main()
