"""What judges of a job raise."""


class Finding(Exception):
    """A promise that was broken: which, and what was seen."""

    def __init__(self, promise: str, seen: str) -> None:
        super().__init__(f"{promise}: {seen}")
        self.promise, self.seen = promise, seen


class Refused(Exception):
    """The job was refused as it should be."""
