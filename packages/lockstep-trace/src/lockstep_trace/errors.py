"""What a user did that a trace or a comparison cannot go on with; the command line turns it into status 2."""

from lockstep_trace.coded import CodedError


class TraceError(CodedError, ValueError):
    """A message for the user: what is wrong, what was expected, what to do."""
