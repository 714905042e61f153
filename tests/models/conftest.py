"""Only `make test-models` runs these tests: they need real model servers, which it builds."""

import os

collect_ignore_glob = [] if "BATCHWRIGHT_TEST_MODELS" in os.environ else ["test_*.py"]
