"""Looking for messages by their codes, and for the values that they name: the words may change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.config.errors import RunError, codes, uncoded


@contextmanager
def raises(code: str, *values: str, error: type[Exception] = RunError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises an error with this code, whose message holds all these values. `error`: another one, such
    as pydantic or `run_on` makes of it."""
    with pytest.raises(error) as caught:
        yield caught
    assert mentions(str(caught.value), code, *values)


def mentions(text: str, code: str, *values: str) -> bool:
    """Whether a text holds a message with this code and, beside it, all these values."""
    held = " ".join(uncoded(text).split())
    missing = [value for value in values if " ".join(value.split()) not in held]
    assert code in codes(text), f"{code} is not in: {text}"
    assert not missing, f"{missing} not in: {text}"
    return True
