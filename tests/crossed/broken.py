"""Errors that judges of a job raise."""

from __future__ import annotations


class Finding(Exception):
    """A broken promise: its name, and the observation."""

    def __init__(self, promise: str, seen: str) -> None:
        super().__init__(f"{promise}: {seen}")
        self.promise, self.seen = promise, seen

    def __reduce__(self) -> tuple[type[Finding], tuple[str, str]]:
        return Finding, (self.promise, self.seen)


class Refused(Exception):
    """lockstep refused the job, as it should."""
