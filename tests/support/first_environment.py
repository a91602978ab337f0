"""The variables of the process that runs the tests, before a test has changed any."""

import os

AT_FIRST = dict(os.environ)
