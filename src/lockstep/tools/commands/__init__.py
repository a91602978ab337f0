"""One file a command: HELP, `arguments(parser)` and `main(known)`, which returns the exit status.

Nothing here imports torch at the top, so that `lockstep --help` answers at once. A new command is a new file and its
name in `NAMES`.
"""

# In the order of `lockstep --help`.
NAMES = (
    "train",
    "plan",
    "verify",
    "replay",
    "trace",
    "diff",
    "branch",
    "attest",
    "audit",
    "status",
    "logs",
    "stop",
    "evaluate",
    "predict",
    "bench",
    "sweep",
    "report",
    "push",
    "list",
    "schema",
    "init",
    "doctor",
    "rendezvous",
)
