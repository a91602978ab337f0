"""One token cache for all tests, thrown away afterwards; one thread, as each rank has."""

import os
import tempfile
from pathlib import Path

import pytest

_cache = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
os.environ["LOCKSTEP_CACHE"] = _cache.name  # before any worker process starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = f"{_cache.name}/datasets"


@pytest.fixture(scope="session")
def cache() -> Path:
    """LOCKSTEP_CACHE of this session."""
    return Path(_cache.name)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data beside the checkout, where there is some."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the checkout")
    return folder
