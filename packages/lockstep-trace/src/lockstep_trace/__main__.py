"""Entry point of `python -m lockstep_trace`, equal to `lockstep-trace`. Given a script, it traces that script, for
launchers: `accelerate launch -m lockstep_trace train.py`."""

import sys
from pathlib import Path

from lockstep_trace.commands import main
from lockstep_trace.doors import run_script

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith(".py") and Path(sys.argv[1]).is_file():
        run_script(sys.argv[1:])
    else:
        sys.exit(main())
