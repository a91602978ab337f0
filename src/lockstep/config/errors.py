"""The error class for invalid user input (keys, files, folders, commands), and the exit statuses of a job.

Launchers and schedulers act on the exit statuses. Imports only the message codes.
"""

import errno
import os

from lockstep_trace.coded import CodedError, appended, coded, codes, uncoded, with_addresses

__all__ = ["BAD", "DONE", "EXCLUDED", "FAILED", "HALTED", "STOPPED"]
__all__ += ["CodedError", "InvalidValue", "RunError", "appended", "coded", "codes"]
__all__ += ["OF_DISKS", "REMEDIES", "reason_of", "remedy_of", "uncoded", "with_addresses"]


class RunError(CodedError):
    """Raised for bad usage or an invalid run file, before any process starts. `code` is the message's LS number."""


class InvalidValue(CodedError, ValueError):
    """An invalid value in a run file, raised by validators. Validation reports it with its key and line."""


OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Faults of files and disks, and what to do about each.
REMEDIES = {
    errno.EACCES: "check its permissions and its owner",
    errno.EPERM: "check its permissions and its owner",
    errno.EROFS: "its file system is read-only; use another folder",
    errno.ENOSPC: "free space on the disk, or use another folder",
    errno.EDQUOT: "the disk quota is used up: free space, or use another folder",
    errno.EFBIG: "the system limits the size of files (ulimit -f): raise the limit",
    errno.ENOTDIR: "it is a file, and a folder is expected",
    errno.EISDIR: "it is a folder, and a file is expected",
    errno.ELOOP: "remove one of them, or use another path",
    errno.EIO: "the disk reports an error: check it, or use another one",
    errno.ESTALE: "the network file system has lost it: mount it again",
}


def remedy_of(error: OSError) -> str:
    """Return what to do about a file or disk error."""
    return REMEDIES.get(error.errno or 0, "remove the cause, or use another folder")


def reason_of(error: OSError) -> str:
    """Describe why a file or folder cannot be used."""
    if error.errno == errno.EEXIST and error.filename is not None:
        try:
            os.stat(error.filename)
        except OSError as cause:  # a broken link where a folder is expected
            return reason_of(cause)
    return "its links form a loop" if error.errno == errno.ELOOP else error.strerror or str(error)


DONE = 0
FAILED = 1  # a launcher may restart the job
BAD = 2  # bad usage or run file: a restart would not help
STOPPED = 75  # stopped on request, resumable; EX_TEMPFAIL of sysexits.h, on which schedulers requeue
# Used only between a rank and its launcher, when `sdc_check` detects wrong arithmetic:
HALTED = 76  # end the job: an automatic restart would use the same machine
EXCLUDED = 77  # exclude this rank's machine (on a single machine, this rank) and continue
