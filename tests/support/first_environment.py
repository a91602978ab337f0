"""Environment of the test process before any test has changed it."""

import os

AT_FIRST = dict(os.environ)
