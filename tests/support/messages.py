"""Looking for messages by their codes, and for the values that they name: the words may change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.config.errors import CodedError, RunError, codes, uncoded


@contextmanager
def raises(code: str, *values: str, error: type[CodedError] = RunError) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """The block raises an error with this code, whose message holds all these values."""
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
