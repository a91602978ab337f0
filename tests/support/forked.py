"""A `lockstep` command forked from a process that has imported what it imports: a start in a tenth of the time.

In: words of a command line, a folder, a cache, variables. Out: what looks like `subprocess.Popen`. Only the imports
and the seed of hashes are not the command's own: working directory, session, environment, handlers of signals,
descriptors, limits, and how it ends are those of a new process. The server that its ranks are forked from is forked
from the command, where a new one would import everything again, and so are the processes of `MODULES` and of scripts
that it starts: trials of a sweep, ranks of torchrun. What an import reads cannot be given afterwards: `can_fork` says
whether a command needs a new interpreter. `programs` are `python`, `lockstep` and `torchrun` for a shell, which ask for
such a process (`warm_python.py`).
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import ctypes
import functools
import gc
import json
import logging
import multiprocessing.context
import multiprocessing.process
import os
import resource
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy
import torch.distributed.run  # noqa: F401
from tqdm import tqdm

from lockstep.distributed.signals import STOP_SIGNALS
from lockstep.launchers.processes import elastic  # noqa: F401
from lockstep_trace.run import INJECT
from support.places import TESTS_PATH

# Variables that libraries read while they are imported; PYTHONPATH is seen to.
READ_BY_IMPORTS = (
    "HF_",
    "TORCH_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "ACCELERATE_",
    "DS_",
    "CUDA_",
    "PYTHON",
    "OMP_",
    "LD_",
)
LATER = (
    *(f"ACCELERATE_{name}" for name in ("USE_CPU", "MIXED_PRECISION", "DEBUG_MODE", "CPU_AFFINITY")),
    *(f"ACCELERATE_DYNAMO_{name}" for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC")),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TOKENIZERS_PARALLELISM",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # seen to, or read when they are used
SET = {"DS_ACCELERATOR": "cpu"}  # by `engines` for what it imports, and by commands for what they start
FORK_TRACED = "LOCKSTEP_TESTS_FORK_TRACED"  # a variable: scripts that are traced need no interpreter of their own
# that are run as `python -m`
MODULES = ("lockstep", "lockstep.lab.subprocess_job", "torch.distributed.run", "accelerate.commands.launch")
MODULES += ("lockstep_clouds.sagemaker_entry",)
_NEW_NET, _NEW_MOUNTS, _NEW_NAMES = 0x40000000, 0x20000, 0x4000000  # of <sched.h>
_SLAVE, _DETACH = 0x84000, 2  # of <sys/mount.h>
_Main = type(multiprocessing.process.current_process())  # this file is imported before anything is forked
_spawned = util.spawnv_passfds  # type: ignore[attr-defined]
_executed = subprocess._fork_exec  # type: ignore[attr-defined]
_imported_with: dict[str, str] = {}  # in the process of a command: what it began with


def can_fork(words: Sequence[str], environment: dict[str, str], server: dict[str, str]) -> bool:
    """Whether no import would read in `environment` what it did not read in the server's, and nothing is to be traced
    from its first import on, unless `FORK_TRACED` says that torch may be there when the tracer begins. What a traced
    process starts itself would have two tracers."""
    if (folder := _injected(environment)) is not None:
        traces = not words[0].startswith("lockstep") and "lockstep_tracer" not in sys.modules
        if not traces or not folder.is_dir() or not environment.get(FORK_TRACED):
            return False
    return not read_differently(environment, server)


def _injected(environment: dict[str, str]) -> Path | None:
    """The folder with the tracer that is on a process's path."""
    folders = map(Path, environment.get("PYTHONPATH", "").split(os.pathsep))
    return next((folder for folder in folders if folder.name == INJECT), None)


def read_differently(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The variables that imports read and that differ."""
    one, other = SET | one, SET | other
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return sorted(name for name in differ - {*LATER} if name.startswith(READ_BY_IMPORTS))


def words_of(command: Sequence[str]) -> list[str] | None:
    """The module and its words of a `python -m` that can be forked, a script and its words, or `-c` with its code; None
    for other commands, and for a portable run, whose libraries look at its variables as they are loaded."""
    words = [word for word in command[1:3] if word != "-u"] + list(command[3:])  # torchrun's: output without a buffer
    if command[0] != sys.executable or not words or "strategy.exact=portable" in words:
        return None
    if words[0] == "-m":
        return words[1:] if words[1:2] and words[1] in MODULES else None
    return words if words[0] == "-c" or words[0].endswith(".py") else None


class Forked:
    """A running command."""

    def __init__(
        self,
        words: list[str],
        folder: Path,
        environment: dict[str, str],
        most_bytes: int | None = None,
        host: tuple[str, str] | None = None,
        terminal: str | None = None,
    ) -> None:
        """`words`: a module and what it is told. `most_bytes`: beyond which none of its files may grow. `host`: the
        network namespace to be in, and the machine's name there; whoever has started it then reads what it says.
        `terminal`: the device of one that it is in the foreground of, and whose other end is read."""
        from support.harness import server_environment

        self.args = words
        server_environment()  # started before its first child
        context = multiprocessing.get_context("forkserver")
        (out, its_out), (err, its_err), (ready, its_ready) = (context.Pipe(duplex=False) for _ in range(3))
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        arguments = (words, str(folder), environment, most_bytes, host, terminal, ignored, its_out, its_err, its_ready)
        self._process = context.Process(target=_become, args=arguments, daemon=True)  # no end of tests waits for it
        self._process.start()
        for theirs in (its_out, its_err, its_ready):
            theirs.close()
        with contextlib.suppress(EOFError):
            ready.recv()
        self.pid = int(self._process.pid or 0)
        self._pipes = out, err
        self.stdout, self.stderr = (
            open(pipe.fileno(), encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            for pipe in self._pipes
        )
        self._said: dict[str, str] = {}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in self._readers if host is None else ():
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        self._said[name] = stream.read()
        stream.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Also waits for others that hold its output, as a pipe's reader does."""
        limit = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if limit is None else max(0, limit - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if limit is None else max(0, limit - time.monotonic()))
        return self._said["out"], self._said["err"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def address() -> str:
    """Where `warm_python.py` asks for processes."""
    from support.harness import server_environment

    variables = server_environment()
    room = tempfile.TemporaryDirectory(prefix="lockstep-warm-")
    atexit.register(room.cleanup)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{room.name}/socket")
    listener.listen(64)
    server = multiprocessing.get_context("forkserver").Process(target=_serve, args=(listener, variables), daemon=True)
    server.start()
    listener.close()
    return f"{room.name}/socket"


def programs(folder: Path) -> Path:
    """`python`, `python3`, `lockstep`, `torchrun`, `accelerate` in `folder`: programs that are this interpreter's."""
    folder.mkdir(parents=True, exist_ok=True)
    client = shlex.join([sys.executable, "-I", "-S", f"{TESTS_PATH}/support/warm_python.py", address()])
    modules = {"lockstep": "lockstep", "torchrun": "torch.distributed.run"}
    modules["accelerate"] = "accelerate.commands.accelerate_cli"
    for name, module in {
        "python": "",
        "python3": "",
        **{name: f"-m {module} " for name, module in modules.items()},
    }.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {client} {module}"$@"\n')
        (folder / name).chmod(0o755)
    return folder


# -- in a process that hands out others ----------------------------------------------------------------------------


def _serve(listener: socket.socket, variables: dict[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which multiprocessing ends it, whatever runs before have ignored
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            try:
                _stand_in(connection, variables)
            finally:
                os._exit(1)
        connection.close()


def _stand_in(connection: socket.socket, variables: dict[str, str]) -> None:
    """Begin the process that was asked for, pass on signals, and say how it ended. It is killed if its client is."""
    head, descriptors, *_ = socket.recv_fds(connection, 4, 3)
    (size,), body = struct.unpack("I", head), b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    asked, folder, environment, ignored = json.loads(body)
    words = words_of([sys.executable, *asked])
    if words is None or not can_fork(words, environment, variables):
        connection.sendall(b"n")  # a new interpreter is needed
        os._exit(0)
    connection.sendall(b"y")
    (client,) = struct.unpack("i8x", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if (pid := os.fork()) == 0:
        os.setsid()
        _move_beside(client)
        os.chdir(folder)
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        numpy.random.seed()
        _no_handlers()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        _interruptible()
        _close_all_but({0, 1, 2})
        _run(words, environment)
    for descriptor in descriptors:
        os.close(descriptor)
    ended, poll = os.pidfd_open(pid), select.poll()
    for place in (ended, connection.fileno()):
        poll.register(place, select.POLLIN)
    while ended not in [place for place, _ in poll.poll()]:
        numbers = connection.recv(64)
        for number in numbers or [signal.SIGKILL]:
            # a node of SLURM that is lost takes with it what the task has started
            (os.kill if numbers or "SLURMD_NODENAME" not in environment else os.killpg)(pid, number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", status))
    os._exit(0)


# -- in the process of the command -----------------------------------------------------------------------------------


def _become(
    words: list[str],
    folder: str,
    environment: dict[str, str],
    most_bytes: int | None,
    host: tuple[str, str] | None,
    terminal: str | None,
    ignored: list[signal.Signals],
    out: Connection,
    err: Connection,
    ready: Connection,
) -> None:
    """Take the place of a new process, and never return."""
    os.setsid()
    if host is not None:
        _move_to(*host)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        for number, place in ((nothing.fileno(), 0), (out.fileno(), 1), (err.fileno(), 2)):
            os.dup2(number, place)
    if terminal is not None:  # the first one that the leader of a session opens is the session's
        for place in range(3):
            os.dup2(os.open(terminal, os.O_RDWR), place)
    numpy.random.seed()  # torch begins with the same number in every process, numpy does not
    _no_handlers()
    for number in STOP_SIGNALS:  # which the server may ignore, when a launcher of a test has started it
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    _interruptible()
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    ready.send(None)
    _close_all_but({0, 1, 2})
    _run(words, environment)


def _run(words: list[str], environment: dict[str, str]) -> None:
    """What a new interpreter does in this folder, with these handlers and descriptors. Never returns."""
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    script = words[0].endswith(".py")
    _path(os.path.dirname(os.path.abspath(words[0])) if script else os.getcwd(), environment.get("PYTHONPATH", ""))
    sys.argv = list(words)
    os.environ.clear()
    os.environ.update(environment)
    _imported_with.clear()
    _imported_with.update(environment)
    tempfile.tempdir = None
    if environment.get("TQDM_DISABLE"):  # which tqdm has read
        tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)  # type: ignore[method-assign]
    _alone()
    if script or words[0] == "-c":
        _trace(environment)
    if words[0] == "-c":
        code, main = compile(words[1], "<string>", "exec"), ModuleType("__main__")
        sys.argv[1:2], sys.modules["__main__"] = [], main
        _end(lambda: exec(code, main.__dict__))
    if script:
        _end(lambda: _run_script(words[0]))
    package = hasattr(sys.modules.get(words[0]), "__path__")
    sys.modules.pop(f"{words[0]}.__main__" if package else words[0], None)  # or Python warns that it is run twice
    _end(lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True))


def _run_script(path: str) -> None:
    """As Python runs a file: its names live until the process ends. `runpy.run_path` frees them at once, and a DDP
    model over gloo that is freed right after a backward joins a thread that waits for the interpreter's lock (torch
    2.13)."""
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _trace(environment: dict[str, str]) -> None:
    """As Python's start does where the tracer is on the path: torch is there, so it begins at once."""
    if (folder := _injected(environment)) is not None:
        start = runpy.run_path(str(folder / "sitecustomize.py"))["start"]
        sys.meta_path.pop(0)  # what waits for torch
        start()


def _move_to(space: str, name: str) -> None:
    """As `ip netns exec SPACE unshare --uts` and `hostname NAME` do."""
    _called("setns", os.open(f"/run/netns/{space}", os.O_RDONLY), _NEW_NET)
    _called("unshare", _NEW_MOUNTS | _NEW_NAMES)
    socket.sethostname(name)
    _called("mount", b"", b"/", b"none", _SLAVE, None)  # /sys tells of this network's devices, and of no other place
    _called("umount2", b"/sys", _DETACH)
    _called("mount", space.encode(), b"/sys", b"sysfs", 0, None)


def _move_beside(pid: int) -> None:
    """To the network, the name and the mounts of another process, such as one in a container."""
    for space, kind in (("net", _NEW_NET), ("uts", _NEW_NAMES), ("mnt", _NEW_MOUNTS)):
        if os.readlink(place := f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}"):
            _called("setns", os.open(place, os.O_RDONLY), kind)


def _called(function: str, *arguments: Any) -> None:
    """Of the C library. Errors: OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}{arguments}")


def _path(folder: str, given: str) -> None:
    """`sys.path` as `python -m` has it in `folder`."""
    ours = {"", os.path.dirname(TESTS_PATH), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    # pytest adds the folders of tests
    others = [path for path in sys.path if path not in ours and not path.startswith(TESTS_PATH)]
    sys.path[:] = [folder, *filter(None, given.split(os.pathsep)), *others]


def _alone() -> None:
    """Nobody's child, as far as `multiprocessing` knows: servers and trackers of the tests are none of its own."""
    processes = multiprocessing.process
    processes._current_process = _Main()  # type: ignore[attr-defined]
    processes._parent_process = None  # type: ignore[attr-defined]
    processes.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    multiprocessing.context._default_context._actual_context = None  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    processes._children = set()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    util.spawnv_passfds = _forked_server  # type: ignore[attr-defined]
    subprocess._fork_exec = _forked_module  # type: ignore[attr-defined]
    concurrent.futures.thread._threads_queues.clear()  # of pools, one of whose threads may have forked this process
    # what the process before registered for its own end, such as to remove its temporary folders
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for last in (logging.shutdown, util._exit_function):  # type: ignore[attr-defined]
        atexit.register(last)


def _end(main: Callable[[], object]) -> None:
    """As the interpreter ends: with a traceback or none, after all threads and what was registered for the end."""
    status: object = 1
    try:
        main()
        status = None
    except SystemExit as left:
        status = left.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    stream: IO[str]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _interruptible() -> None:
    """As Python begins, unless Ctrl-C is ignored."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _no_handlers() -> None:
    """As after `exec`: what is ignored stays so."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _close_all_but(kept: set[int]) -> None:
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _forked_server(path: bytes, words: list[str], descriptors: list[int]) -> int:
    """Instead of `multiprocessing.util.spawnv_passfds`: also the server that ranks are forked from has imported all."""
    if "forkserver import main" not in words[-1]:
        return _spawned(path, words, descriptors)
    if pid := os.fork():
        return pid
    _close_all_but({0, 1, 2, *descriptors})
    _no_handlers()
    try:
        exec(words[-1])
    finally:
        os._exit(0)


def _forked_module(
    args: Sequence[str],
    executables: Sequence[bytes],
    close_others: bool,
    kept: Sequence[int],
    folder: str | None,
    variables: Sequence[bytes] | None,
    *more: Any,
) -> int:
    """Instead of `subprocess._fork_exec`: what a command starts as `python -m` of a module that has been imported."""
    words = words_of([os.fsdecode(word) for word in args])
    pairs = [os.fsdecode(each).partition("=") for each in variables or ()]
    environment = dict(os.environ) if variables is None else {name: value for name, _, value in pairs}
    stdin, _, _, stdout, _, stderr, _, failed, _, session, group, _, _, _, _, before_it = more[:16]
    if words is None or before_it is not None or not can_fork(words, environment, _imported_with):
        return int(_executed(args, executables, close_others, kept, folder, variables, *more))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return pid
    gc.freeze()  # what the process before has left: a store whose threads are not here ends a process that collects it
    try:
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        for number, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if number >= 0:
                os.dup2(number, place)
        os.close(failed)  # whose end tells that it has begun
        _close_all_but({0, 1, 2, *kept} - {failed})
        _no_handlers()
        _interruptible()
        os.chdir(folder or ".")
        _run(words, environment)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
