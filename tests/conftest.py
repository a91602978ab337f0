"""Shared fixtures: one token cache for all tests, removed afterwards; one thread, as on each rank."""

import compileall
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from packaging.version import Version

from support import surroundings

if TYPE_CHECKING:
    from support.command import CommandJob

surroundings.close()
_cache = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
os.environ["LOCKSTEP_CACHE"] = _cache.name  # before any worker process starts
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("lockstep", deadline=None)  # a busy machine is no failure
settings.load_profile("lockstep")
os.environ["HF_DATASETS_CACHE"] = f"{_cache.name}/datasets"

# The distributions of this checkout, wherever they are installed from.
sys.path[:0] = [str(_folder) for _folder in sorted((Path(__file__).parents[1] / "packages").glob("*/src"))]

if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    # Otherwise every rank and command would compile its imports again, a fifth of a small job's time.
    for _folder in (Path(__file__).parent, Path(__file__).parents[1] / "src"):
        compileall.compile_dir(_folder, quiet=2)

if hasattr(os, "SCHED_BATCH"):
    # gloo's thread, once woken, took the CPU from the thread it waits for, and polled: a quarter of the time of some
    # tests (benchmarks/log.md). This scheduling class does not preempt others.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

os.fsync = lambda descriptor: None  # a tenth of the time; no test cuts the power. Processes that are started do sync.

# Imported and collected objects stay: collecting among them takes a quarter of the time.
gc.disable()

# These imports read the variables. None imports torch: the process that distributes tests does without, and fixtures
# below import what needs it.
from lockstep.distributed.signals import STOP_SIGNALS  # noqa: E402
from support import kernel  # noqa: E402
from support.first_environment import AT_FIRST  # noqa: E402

# approximate duration of a test with this mark, in units of a test with one rank
WEIGHTS = {"processes": 1, "slow": 4, "cluster": 15}

# additional time of files: compilation, the whole quick start, a REPL, hosts and pods with their own interpreters,
# joining and leaving ranks, hundreds of steps in pytest's process
BEYOND = {"test_compiled.py": 40, "test_quick_start.py": 40, "test_python.py": 30, "test_kubernetes_pods.py": 15}
BEYOND |= {"test_page_commands.py": 150, "test_portable.py": 50, "test_lost_shards.py": 45, "test_hang_watchdog.py": 15}
BEYOND |= {"test_recovery.py": 70, "test_sagemaker_hosts.py": 50, "test_hosts.py": 40, "test_pipeline.py": 40}
BEYOND |= {"test_without_gpu.py": 30, "test_stream.py": 10, "test_stream_elsewhere.py": 5, "test_label_exports.py": 5}

READ_SOURCES = ("repo/", "config/test_lazy.py", "config/test_written_messages.py")

_started: list[str] = []  # processes started by the current test


def _counted(start: Callable[..., Any]) -> Callable[..., Any]:
    def started(*arguments: Any, **named: Any) -> Any:
        command = arguments[1] if arguments[1:] else named.get("args", arguments[0])
        # the commit, and `platform.processor()`, cost milliseconds
        if not (isinstance(command, (list, tuple)) and command[0] in ("git", "uname")):
            _started.append(str(command))
        return start(*arguments, **named)

    return started


subprocess.Popen.__init__ = _counted(subprocess.Popen.__init__)  # type: ignore[method-assign]
BaseProcess.start = _counted(BaseProcess.start)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Order files so that long ones come first: started last, one of them would run alone at the end. Those of hosts
    and nodes, which mostly wait, alternate with others."""
    if not any("::" in word for word in config.args):  # single tests may be selected
        kernel.mark(items)
    if Version(version("torch")) < Version("2.13"):  # the lower end of the range: .ci/newest --lowest
        for item in items:
            if "pipeline" in item.nodeid.lower():
                item.add_marker(pytest.mark.skip(reason="pipeline needs torch 2.13"))
    yield  # unselected tests are removed here
    jobs = Counter({item.path: BEYOND.get(item.path.name, 0) for item in items})
    for item in items:
        jobs[item.path] += sum(weight for mark, weight in WEIGHTS.items() if mark in item.keywords)
    order, hosts = sorted(jobs, key=lambda path: -jobs[path]), {i.path for i in items if "cluster" in i.keywords}
    kinds = [path for path in order if path in hosts], [path for path in order if path not in hosts]
    places = {path: place for kind in kinds for place, path in enumerate(kind)}
    items.sort(key=lambda item: (places[item.path], item.path in hosts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `make test`, give the files of the kernel to one worker, because each worker that starts processes first
    starts a server, whose imports take ten seconds; and those that parse the sources to one, because each worker parses
    them again."""
    if config.option.dist != "loadfile" or "not processes or kernel" not in config.option.markexpr:
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.removeprefix("tests/") in kernel.FILES:
                return "kernel"
            return "sources" if file.removeprefix("tests/").startswith(READ_SOURCES) else file

    return Together(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()  # exclude it from collections
    gc.set_threshold(20_000)  # objects: with Python's 700 a fifth of the time goes into garbage collection
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_files_imported_stays() -> None:
    """Freeze imported objects: every run collects garbage before it measures its tensors."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _started.clear()
    if (
        "processes" in item.keywords
    ):  # a command that runs in this process would start the server with its own variables
        from support.harness import server_environment

        server_environment()


@pytest.fixture(autouse=True)
def _what_starts_processes_says_so(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require the mark `processes` on tests that start some; `make test` leaves these out, except for the kernel."""
    yield
    if "processes" not in request.keywords:
        assert not _started, f"starts processes, and is not marked `processes`: {_started[:3]}"


def _listen() -> None:
    """Handle stop signals as a new interpreter does, and block none. A run that ends in this process ignores them, as
    the starter of the tests may; later processes would inherit that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


_listen()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, Any, Any]:
    """Listen again after each fixture: fixtures of modules train in this process too."""
    try:
        return (yield)
    finally:
        _listen()


@pytest.fixture(autouse=True)
def _signals_and_variables_are_as_before() -> Iterator[None]:
    """Restore signal handlers and variables. A run that ends in this process sets variables that engines read; with
    these no later command could be forked (`forked.can_fork`), or, after a portable run, would compute with other
    kernels."""
    from lockstep.config.processor import VARIABLES
    from support.forked import read_differently

    arithmetic = [name for name in VARIABLES if os.environ.get(name) != AT_FIRST.get(name)]
    for name in {*read_differently(dict(os.environ), AT_FIRST), *arithmetic}:  # left behind by a fixture of the module
        if name in AT_FIRST:
            os.environ[name] = AT_FIRST[name]
        else:
            del os.environ[name]
    variables = dict(os.environ)
    yield
    _listen()
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_chosen_first() -> None:
    """Compute something before any test: libraries read the variables of `strategy.exact: portable` when they first
    compute, so after a portable run this process would have other bits than the processes that it starts."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):  # by torch, MKL and oneDNN
        numbers = torch.ones(64, 64, dtype=dtype)
        torch.nn.functional.gelu(numbers @ numbers)
        torch.nn.functional.conv1d(numbers[None], numbers[:, :, None])


@pytest.fixture(scope="session", autouse=True)
def _small_models_are_tried_once() -> None:
    """Keep the verdicts of trials on small models for the session, in tests with a cache of their own too."""
    from lockstep.tasks.models import padding

    padding.cache_folder = lambda: Path(_cache.name)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def cache() -> Path:
    """LOCKSTEP_CACHE of this session."""
    return Path(_cache.name)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data beside the checkout, if available."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the checkout")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_file(here: Path) -> Path:
    """`run.yaml` of a small run of two processes, in the test's working directory."""
    from support.command import write

    return write(here)


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the test imports modules, with a separate token cache."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has two GPUs, for counting."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def job(tmp_path: Path, cache: Path) -> "CommandJob":
    """A job by the command in a folder of the test."""
    from support.command import CommandJob

    return CommandJob(tmp_path, cache)


@pytest.fixture
def nobody_is_left(tmp_path: Path) -> Iterator[None]:
    """Assert that no process of the test's folder outlives it."""
    from support.command import kill, processes_in, until

    yield
    try:
        until(lambda: not processes_in(tmp_path), "every process of the job to end", seconds=30)
    finally:
        kill(*processes_in(tmp_path))


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """An undisturbed job of two processes, in a new interpreter. One of pytest's workers runs it, each has a copy."""
    from support.command import LOCKSTEP, ended, start_anew, write
    from support.harness import lean

    root = tmp_path_factory.getbasetemp()
    made = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "untouched-once"
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not (made / "done").exists():
            shutil.rmtree(made, ignore_errors=True)
            write(made / "job", verify={"plain": True})
            # on any load
            process = start_anew([*LOCKSTEP, "train", "run.yaml"], made / "job", cache, **lean())
            status, _, err = ended(process, 1000)
            assert status == 0, err
            (made / "done").touch()
    return shutil.copytree(made / "job", tmp_path_factory.mktemp("untouched") / "job", symlinks=True)
