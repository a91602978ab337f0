"""Redaction of secrets and control characters, re-exported from lockstep-trace, which also works alone."""

from lockstep_trace.redaction import (
    STRUCK,
    holds_secret,
    kept_secret,
    names_secret,
    one_line,
    printable,
    redact,
    redact_all,
    redact_words,
    secrets_in_environment,
    visible,
)

__all__ = [
    "STRUCK",
    "holds_secret",
    "kept_secret",
    "names_secret",
    "one_line",
    "printable",
    "redact",
    "redact_all",
    "redact_words",
    "secrets_in_environment",
    "visible",
]
