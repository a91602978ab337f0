"""Redacts secrets in nested values, detects them in texts, and shortens messages. `lockstep_trace.redaction` redacts
one text.

In: values of a run file, records, a library's error. Out: the same without anything that looks like a secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep_trace.redaction import PATTERNS, STRUCK, TOKEN, names_secret, printable, redact, secrets_in_environment

_NO_WORD = 16  # min. length to reject a run file: a weak password may also be a project name


def redact_all(values: Any, filtered: Callable[[str], str] = redact) -> Any:
    """Redact every text in nested mappings and lists, including keys, and every value whose key names a secret.
    `filtered`: function applied to each text."""
    if filtered in (redact, printable):  # the environment is read once, which takes longer than a short text
        filtered = partial(filtered, of_environment=secrets_in_environment())
    if isinstance(values, str):
        return filtered(values)
    if isinstance(values, dict):
        return {
            filtered(k) if isinstance(k, str) else k: STRUCK if kept_secret(k, v) else redact_all(v, filtered)
            for k, v in values.items()
        }
    return [redact_all(value, filtered) for value in values] if isinstance(values, list | tuple) else values


def kept_secret(key: Any, value: Any) -> bool:
    """Return whether a key indicates that its value, a text or a number, is a secret. Token counts are not."""
    if not isinstance(key, str) or isinstance(value, bool) or not names_secret(key):
        return False
    return bool(value) if isinstance(value, str) else isinstance(value, int | float) and key[-5:].lower() != "token"


def holds_secret(text: str, of_environment: tuple[str, ...] | None = None) -> bool:
    """Return whether a text contains something that looks like a secret, or a secret of this process's environment that
    is not a plain word. Redacted values do not count. `of_environment`: the result of `secrets_in_environment`, to
    reuse for many texts."""
    values = secrets_in_environment() if of_environment is None else of_environment
    return (
        TOKEN.search(text) is not None
        or any(len(value) >= _NO_WORD and value in text and not os.path.exists(value) for value in values)
        or any(STRUCK not in match.group() for pattern in PATTERNS for match in pattern.finditer(text))
    )


def one_line(text: object, most: int) -> str:
    """Return a message on one line of at most `most` characters, redacted before it is shortened."""
    return redact(" ".join(str(text).split()))[:most]
