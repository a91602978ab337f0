"""Marks for single cases of parametrized tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Values of a parametrized test that are left to the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Values that are left to those that take many minutes, which `.ci/run` leaves out."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])
