"""One token cache for all tests, thrown away afterwards; one thread, as each rank has."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

_cache = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
os.environ["LOCKSTEP_CACHE"] = _cache.name  # before any worker process starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("lockstep", deadline=None)  # a busy machine is no failure
settings.load_profile("lockstep")
os.environ["HF_DATASETS_CACHE"] = f"{_cache.name}/datasets"

from command import finish, processes_in, until, write  # noqa: E402 - what it imports reads the variables


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


@pytest.fixture
def nobody_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever the test did, no process of its folder outlives it."""
    yield
    try:
        until(lambda: not processes_in(tmp_path), "every process of the job to end", seconds=30)
    finally:
        for pid in processes_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A job of two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("untouched")
    write(folder)
    finish(folder, cache)
    return folder
