"""Redaction of secrets and control characters, for the rooms above: lockstep-trace has it, which is used alone, too."""

from lockstep_trace.redaction import (
    holds_secret,
    kept_secret,
    names_secret,
    one_line,
    printable,
    redact,
    redact_all,
    secrets_in_environment,
    visible,
)

__all__ = [
    "holds_secret",
    "kept_secret",
    "names_secret",
    "one_line",
    "printable",
    "redact",
    "redact_all",
    "secrets_in_environment",
    "visible",
]
