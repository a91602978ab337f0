"""`python -m lockstep_trace`, which is `lockstep-trace`; with a script in place of a command it runs and traces it, so
that launchers can start it: `accelerate launch -m lockstep_trace train.py`."""

import sys
from pathlib import Path

from lockstep_trace.commands import main
from lockstep_trace.doors import run_script

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith(".py") and Path(sys.argv[1]).is_file():
        run_script(sys.argv[1:])
    else:
        sys.exit(main())
