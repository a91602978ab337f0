"""Redaction of secrets and control characters, for the rooms above: lockstep-trace has it, which is used alone, too."""

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
