"""Marks for single cases of parametrized tests, and for tests that need a package."""

from importlib.util import find_spec
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameter values for slow tests only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Parameter values for tests of many minutes, which `.ci/run` leaves out."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])


def needs(package: str) -> None:
    """Skip the test, or at the top of a file all of its tests, without a package. Unlike `pytest.importorskip` it does
    not import it: DeepSpeed takes seconds, in each of pytest's workers, and its ranks are other processes."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
