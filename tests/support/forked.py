"""Fork a `lockstep` command from a process with its imports: starts in a tenth of the time.

In: words of a command line, a folder, a cache, variables. Out: an object like `subprocess.Popen`. Only the imports and
the hash seed are shared: working directory, session, environment, signal handlers, descriptors, limits and the exit are
those of a new process. The fork server of its ranks is forked from the command, as are the processes of `MODULES` and
scripts that it starts: trials of a sweep, ranks of torchrun. Variables that imports read cannot be changed afterwards:
`can_fork` says whether a command needs a new interpreter. `programs` are `python`, `lockstep` and `torchrun` for a
shell, which request such a process (`warm_python.py`).
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
from collections.abc import Callable, Container, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy
import torch.distributed.run  # noqa: F401
from tqdm import tqdm

from lockstep.distributed.signals import STOP_SIGNALS
from lockstep.launchers.processes import elastic_agent  # noqa: F401
from lockstep_trace.terminal import INJECT
from support.places import TESTS_PATH

# Variables that libraries read at import; PYTHONPATH is handled.
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
)  # handled, or read at use
SET = {"DS_ACCELERATOR": "cpu"}  # by `engines` for its imports, and by commands for their children
FORK_TRACED = "LOCKSTEP_TESTS_FORK_TRACED"  # a variable: traced scripts need no new interpreter
# modules run as `python -m`
MODULES = ("lockstep", "lockstep.lab.subprocess_job", "torch.distributed.run", "accelerate.commands.launch")
MODULES += ("lockstep_clouds.sagemaker_entry",)
_NEW_NET, _NEW_MOUNTS, _NEW_NAMES = 0x40000000, 0x20000, 0x4000000  # of <sched.h>
_SLAVE, _DETACH = 0x84000, 2  # of <sys/mount.h>
_Main = type(multiprocessing.process.current_process())  # this file is imported before any fork
_spawned = util.spawnv_passfds  # type: ignore[attr-defined]
_executed = subprocess._fork_exec  # type: ignore[attr-defined]
_imported_with: dict[str, str] = {}  # in a command's process: its initial variables


def can_fork(words: Sequence[str], environment: dict[str, str], server: dict[str, str]) -> bool:
    """Whether no import would read `environment` differently from the server's, and nothing must be traced from its
    first import on, unless `FORK_TRACED` allows torch to be imported before the tracer. Children of a traced process
    would have two tracers."""
    if (folder := _injected(environment)) is not None:
        traces = not words[0].startswith("lockstep") and "lockstep_tracer" not in sys.modules
        if not traces or not folder.is_dir() or not environment.get(FORK_TRACED):
            return False
    return not read_differently(environment, server)


def _injected(environment: dict[str, str]) -> Path | None:
    """Folder with the tracer on a process's path."""
    folders = map(Path, environment.get("PYTHONPATH", "").split(os.pathsep))
    return next((folder for folder in folders if folder.name == INJECT), None)


def read_differently(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Variables read by imports that differ."""
    one, other = SET | one, SET | other
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return sorted(name for name in differ - {*LATER} if name.startswith(READ_BY_IMPORTS))


def words_of(command: Sequence[str]) -> list[str] | None:
    """Module and words of a forkable `python -m`, a script and its words, or `-c` with its code; None for other
    commands, and for a portable run, whose libraries read its variables while loading."""
    words = [word for word in command[1:3] if word != "-u"] + list(command[3:])  # torchrun's flag for unbuffered output
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
        """`words`: a module and its arguments. `most_bytes`: limit of file sizes. `host`: the network namespace and
        host name; its starter reads the output. `terminal`: the device of a terminal in whose foreground it runs."""
        from support.harness import server_environment

        self.args = words
        server_environment()  # started before its first child
        context = multiprocessing.get_context("forkserver")
        (out, its_out), (err, its_err), (ready, its_ready) = (context.Pipe(duplex=False) for _ in range(3))
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        arguments = (words, str(folder), environment, most_bytes, host, terminal, ignored, its_out, its_err, its_ready)
        # the end of tests does not wait for it
        self._process = context.Process(target=_become, args=arguments, daemon=True)
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
        """Wait for the end, and for other holders of its output, as a reader of a pipe does."""
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
    """Address at which `warm_python.py` requests processes."""
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
    """Create `python`, `python3`, `lockstep`, `torchrun`, `accelerate` in `folder`, all for this interpreter."""
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


# -- in a process that serves requests ---------------------------------------------------------------------------------


def _serve(listener: socket.socket, variables: dict[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    # multiprocessing ends it with SIGTERM, which an ancestor may have ignored
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    """Start the requested process, forward signals, and report its end. It is killed if its client dies."""
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
        _signals(ignored)
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
            # a lost SLURM node kills everything that its task has started
            (os.kill if numbers or "SLURMD_NODENAME" not in environment else os.killpg)(pid, number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", status))
    os._exit(0)


# -- in the process of the command
# --------------------------------------------------------------------------------------


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
    """Become the new process; never returns."""
    os.setsid()
    if host is not None:
        _move_to(*host)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        for number, place in ((nothing.fileno(), 0), (out.fileno(), 1), (err.fileno(), 2)):
            os.dup2(number, place)
    if terminal is not None:  # the first terminal opened by a session leader becomes the session's
        for place in range(3):
            os.dup2(os.open(terminal, os.O_RDWR), place)
    numpy.random.seed()  # torch starts with the same seed in every process, numpy does not
    _signals(ignored)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    ready.send(None)
    _close_all_but({0, 1, 2})
    _run(words, environment)


def _run(words: list[str], environment: dict[str, str]) -> None:
    """Run as a new interpreter would, in this folder with these handlers and descriptors. Never returns."""
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
    if environment.get("TQDM_DISABLE"):  # tqdm has read it
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
    # otherwise Python warns about running it twice
    sys.modules.pop(f"{words[0]}.__main__" if package else words[0], None)
    _end(lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True))


def _run_script(path: str) -> None:
    """Run a script as Python does: its names live until the process ends. `runpy.run_path` frees them at once, and a
    DDP model over gloo that is freed right after a backward joins a thread that waits for the interpreter's lock (torch
    2.13)."""
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _trace(environment: dict[str, str]) -> None:
    """Start the tracer as Python's startup does if it is on the path; torch is imported, so it begins at once."""
    if (folder := _injected(environment)) is not None:
        start = runpy.run_path(str(folder / "sitecustomize.py"))["start"]
        sys.meta_path.pop(0)  # the finder that waits for torch
        start()


def _move_to(space: str, name: str) -> None:
    """Do what `ip netns exec SPACE unshare --uts` and `hostname NAME` do."""
    _called("setns", os.open(f"/run/netns/{space}", os.O_RDONLY), _NEW_NET)
    _called("unshare", _NEW_MOUNTS | _NEW_NAMES)
    socket.sethostname(name)
    _called("mount", b"", b"/", b"none", _SLAVE, None)  # /sys must show this network's devices
    _called("umount2", b"/sys", _DETACH)
    _called("mount", space.encode(), b"/sys", b"sysfs", 0, None)


def _move_beside(pid: int) -> None:
    """Enter the network, host name and mounts of another process, such as one in a container."""
    for space, kind in (("net", _NEW_NET), ("uts", _NEW_NAMES), ("mnt", _NEW_MOUNTS)):
        if os.readlink(place := f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}"):
            _called("setns", os.open(place, os.O_RDONLY), kind)


def _called(function: str, *arguments: Any) -> None:
    """Call a function of the C library. Errors: OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}{arguments}")


def _path(folder: str, given: str) -> None:
    """Return `sys.path` of a `python -m` that is started in `folder`."""
    ours = {"", os.path.dirname(TESTS_PATH), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    # added by pytest: folders of tests
    others = [path for path in sys.path if path not in ours and not path.startswith(TESTS_PATH)]
    sys.path[:] = [folder, *filter(None, given.split(os.pathsep)), *others]


def _alone() -> None:
    """Detach from the tests' servers and trackers, as far as `multiprocessing` knows."""
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
    # of thread pools; one of their threads may have forked this process
    concurrent.futures.thread._threads_queues.clear()
    # exit handlers of the parent, for example removing its temporary folders
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for last in (logging.shutdown, util._exit_function):  # type: ignore[attr-defined]
        atexit.register(last)


def _end(main: Callable[[], object]) -> None:
    """End as the interpreter does: with or without a traceback, after all threads and exit handlers."""
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


def _signals(ignored: Container[int]) -> None:
    """Handle signals as a shell's command does that ignores `ignored`, and block none. A fork server that a test's
    launcher has started ignores and blocks them."""
    _no_handlers()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _interruptible()


def _interruptible() -> None:
    """Restore Ctrl-C handling as at Python's start, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _no_handlers() -> None:
    """Reset handlers as `exec` does: ignored signals stay ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _close_all_but(kept: set[int]) -> None:
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _forked_server(path: bytes, words: list[str], descriptors: list[int]) -> int:
    """Replaces `multiprocessing.util.spawnv_passfds`, so that the fork server of ranks has all imports, too."""
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
    """Replaces `subprocess._fork_exec` for `python -m` of an imported module."""
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
    gc.freeze()  # the parent's objects: collecting a store without its threads ends the process
    try:
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        for number, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if number >= 0:
                os.dup2(number, place)
        os.close(failed)  # closing it signals the start
        _close_all_but({0, 1, 2, *kept} - {failed})
        _no_handlers()
        _interruptible()
        os.chdir(folder or ".")
        _run(words, environment)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
