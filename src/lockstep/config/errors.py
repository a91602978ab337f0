"""The one error of everything that a user gives (keys, files, folders, commands), and the exit statuses of a job,
which launchers and schedulers act on. Imports nothing but the message codes.
"""

from lockstep_trace.coded import CodedError, appended, coded, codes, uncoded, with_addresses

__all__ = ["BAD", "DONE", "EXCLUDED", "FAILED", "HALTED", "STOPPED"]
__all__ += ["CodedError", "InvalidValue", "RunError", "appended", "coded", "codes", "uncoded", "with_addresses"]


class RunError(CodedError):
    """Bad usage or a bad run file: one message for the user, exit status 2, before any process starts."""


class InvalidValue(CodedError, ValueError):
    """A value that a section of a run file refuses. Validation reports it with its key and line."""


DONE = 0
FAILED = 1  # a launcher may start the job again
BAD = 2  # bad usage or run file: starting again would not help
STOPPED = 75  # stopped on request, and can be resumed; EX_TEMPFAIL of sysexits.h, on which schedulers queue again
# Only between a rank and its launcher, by `guard`, which found wrong arithmetic:
HALTED = 76  # the job ends; started again by itself, it would meet the same machine
EXCLUDED = 77  # this rank's machine (on one machine, this rank) was wrong: the job goes on without it
