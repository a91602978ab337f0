"""`python -m lockstep_trace`, which is `lockstep-trace`."""

import sys

from lockstep_trace.commands import main

if __name__ == "__main__":
    sys.exit(main())
