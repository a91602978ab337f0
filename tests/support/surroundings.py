"""What of a person's environment reaches the tests: a list of names, and nothing else. Tests then come to the same
result wherever they run, and what a job does with a variable is seen where a test sets it.

In: the variables of whoever runs the tests, such as WANDB_MODE, HF_HOME, NO_COLOR, RANK, GIT_DIR. Out: those that find
programs, packages and the devices that tests are to run on. Called before a library of ours is imported.
"""

import os
from pathlib import Path

# Programs and where they are, temporary files, packages and their index, compilers, certificates
KEPT = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"}
KEPT |= {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX"}
KEPT |= {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CUDA_HOME"}
KEPT |= {"TORCHINDUCTOR_CACHE_DIR"}
# What the tests themselves are asked for
KEPT |= {f"LOCKSTEP_{name}" for name in ("GOLDEN", "SEED", "RECORD", "TIMES", "JOBS", "FAULTS")}
PREFIXES = ("PYTEST_", "PIP_", "UV_", "COVERAGE_", "COV_", "LOCKSTEP_TESTS_", "CROSSED_")
if Path("/dev/nvidiactl").exists():  # which of the GPUs; without any, it only changes what is said of them
    KEPT |= {"CUDA_VISIBLE_DEVICES"}


def close() -> list[str]:
    """Remove every other variable from this process's environment, and so from those that it starts. Returns their
    names."""
    removed = sorted(name for name in os.environ if name not in KEPT and not name.startswith(PREFIXES))
    for name in removed:
        del os.environ[name]
    return removed
