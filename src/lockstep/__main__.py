"""`python -m lockstep ...` and `torchrun ... -m lockstep ...` are the `lockstep` command."""

import sys

from lockstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
