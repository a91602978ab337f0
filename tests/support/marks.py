"""Marks for single cases of parametrized tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameter values for slow tests only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Parameter values for tests of many minutes, which `.ci/run` leaves out."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])
