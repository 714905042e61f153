"""A command of Batchwright in the perturbed mode: `python -m tests.perturbed.process NAME worker --config FILE`.

Its delays depend on BATCHWRIGHT_PERTURB_SEED and on its name.
"""

from __future__ import annotations

import sys

from batchwright.commands import main
from tests.perturb import perturbed_process

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.argv = ["batchwright", *arguments]
    with perturbed_process(name):
        main()
