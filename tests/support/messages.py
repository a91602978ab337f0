"""Check messages by their codes and the values they name; their wording may change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.config.errors import RunError, codes, uncoded


@contextmanager
def raises(code: str, *values: str, error: type[Exception] = RunError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Context that expects an error with this code whose message contains all these values. `error`: another class,
    such as pydantic's or that of `run_on`."""
    with pytest.raises(error) as caught:
        yield caught
    assert mentions(str(caught.value), code, *values)


def mentions(text: str, code: str, *values: str) -> bool:
    """Whether a text has a message with this code that contains all these values."""
    held = " ".join(uncoded(text).split())
    missing = [value for value in values if " ".join(value.split()) not in held]
    assert code in codes(text), f"{code} is not in: {text}"
    assert not missing, f"{missing} not in: {text}"
    return True
