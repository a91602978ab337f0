"""The error class for invalid user input; the command line exits with status 2."""

from lockstep_trace.coded import CodedError


class TraceError(CodedError, ValueError):
    """A message for the user: what is wrong, what was expected, what to do."""
