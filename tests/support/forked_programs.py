"""Programs for a shell whose commands are forked: `lockstep` and `torchrun` without the seconds of their imports.

In: a folder. Out: small programs in it, for the PATH of a shell, and a thread that starts for each call a `Forked`
with the caller's words, folder, variables, input and output. A signal to the program goes to the command, and a
program that is killed takes the command with it. Where a variable that imports read differs, the program becomes an
interpreter of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.forked import Forked, can_fork
from support.harness import server_environment

ANEW = {"--simulate", "--suggest"}  # ranks are simulated in a process that has imported nothing before
MODULES = {"lockstep": "lockstep", "torchrun": "torch.distributed.run"}
# It runs without site-packages: ten milliseconds.
_PROGRAM = """
import json, os, signal, socket, struct, sys
words = [{module!r}, *sys.argv[1:]]
if not {anew!r}.isdisjoint(words):
    os.execv({python!r}, [{python!r}, "-m", *words])
caller = socket.socket(socket.AF_UNIX)
with open({address!r}) as place:
    caller.connect(place.read())
data = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(caller, [struct.pack("!I", len(data))], [0, 1, 2])
caller.sendall(data)
if caller.recv(1) != b"f":
    os.execv({python!r}, [{python!r}, "-m", *words])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: caller.sendall(bytes([number])))
status = struct.unpack("!i", caller.recv(4))[0]
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def programs(folder: Path) -> Iterator[None]:
    """Write the programs into `folder`, and answer them until the end of the block."""
    # the path of a socket has at most a hundred characters
    with tempfile.TemporaryDirectory(prefix="programs-") as room, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{room}/s")
        listener.listen()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "address").write_text(f"{room}/s")
        for name, module in MODULES.items():
            text = _PROGRAM.format(module=module, anew=ANEW, address=str(folder / "address"), python=sys.executable)
            (folder / f".{name}.py").write_text(text)
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -ISs {folder}/.{name}.py "$@"\n')
            program.chmod(0o755)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        yield
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller, suppress(BrokenPipeError, ConnectionResetError):
        head, streams, _, _ = socket.recv_fds(caller, 4, 3)
        words, folder, environment = json.loads(_exactly(caller, struct.unpack("!I", head)[0]))
        if not can_fork(environment, server_environment()):
            for number in streams:
                os.close(number)
            caller.sendall(b"e")
            return
        process = Forked(words, Path(folder), environment, streams=(streams[0], streams[1], streams[2]))
        caller.sendall(b"f")
        threading.Thread(target=_pass_on, args=(caller, process), daemon=True).start()
        caller.sendall(struct.pack("!i", _status(process)))


def _status(process: Forked) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(3600)


def _pass_on(caller: socket.socket, process: Forked) -> None:
    """Signals, and the end of the program."""
    with suppress(OSError):
        while number := caller.recv(1):
            process.send_signal(number[0])
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def _exactly(caller: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = caller.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
