"""Restrict the environment variables that reach the tests to a list, so that results are the same everywhere, and a
job's use of a variable is tested where a test sets it.

In: variables of the caller, such as WANDB_MODE, HF_HOME, NO_COLOR, RANK, GIT_DIR. Out: those that locate programs,
packages and devices. Called before a library of ours is imported.
"""

import os
from pathlib import Path

# locations of programs, temporary files, packages and their index, compilers, certificates
KEPT = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"}
KEPT |= {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX"}
KEPT |= {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CUDA_HOME"}
KEPT |= {"TORCHINDUCTOR_CACHE_DIR"}
# options of the tests
KEPT |= {f"LOCKSTEP_{name}" for name in ("GOLDEN", "SEED", "RECORD", "TIMES", "JOBS", "FAULTS")}
PREFIXES = ("PYTEST_", "PIP_", "UV_", "COVERAGE_", "COV_", "LOCKSTEP_TESTS_", "CROSSED_")
if Path("/dev/nvidiactl").exists():  # choice of GPUs; without any it would only change messages
    KEPT |= {"CUDA_VISIBLE_DEVICES"}


def close() -> list[str]:
    """Remove every other variable from this process's environment, and so from its children's. Returns their names."""
    removed = sorted(name for name in os.environ if name not in KEPT and not name.startswith(PREFIXES))
    for name in removed:
        del os.environ[name]
    return removed
