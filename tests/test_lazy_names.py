"""Public names are imported when they are used first, and cost nothing before."""

import subprocess
import sys

import pytest

import batchwright
from batchwright import app, errors
from batchwright.operations import decorator


def test_a_name_is_the_object_of_its_module():
    assert batchwright.AsyncBatchwright is app.AsyncBatchwright
    assert batchwright.operation is decorator.operation
    assert batchwright.NotFound is errors.NotFound


def test_all_names_are_listed_and_no_other_is_there():
    assert set(batchwright.__all__) <= set(dir(batchwright))
    with pytest.raises(AttributeError, match="module 'batchwright' has no attribute 'Nothing'"):
        _ = batchwright.Nothing
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from batchwright import Nothing")


def test_the_package_itself_loads_nothing():
    code = "import sys, batchwright; print(*sorted(name for name in sys.modules if name.startswith('batchwright')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["batchwright"]
    namespace: dict[str, object] = {}
    exec("from batchwright import *", namespace)
    assert set(batchwright.__all__) <= set(namespace)
