"""How a job ends, as an exit status: the one home of these numbers, which launchers and schedulers act on."""

DONE = 0
FAILED = 1  # a launcher may start the job again
BAD = 2  # bad usage or run file: starting again would not help
STOPPED = 75  # stopped on request, and can be resumed; EX_TEMPFAIL of sysexits.h, on which schedulers queue again
