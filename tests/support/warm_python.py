"""`python` for a shell, without the seconds of its imports: requests a process with them from `forked.address`.

python -I -S warm_python.py ADDRESS WORDS ...

In: words as for `python`; working directory, variables, descriptors and ignored signals are passed on. Out: the
process's exit status, or the signal that ended it. It becomes a new interpreter if such a process would not do.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, words: list[str]) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    body = json.dumps([words, os.getcwd(), dict(os.environ), ignored]).encode()
    socket.send_fds(connection, [struct.pack("I", len(body))], [0, 1, 2])
    connection.sendall(body)
    if connection.recv(1) != b"y":
        os.execv(sys.executable, [sys.executable, *words])
    for number in {*PASSED_ON} - {*ignored}:
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    (status,) = struct.unpack("i", connection.recv(4))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main(sys.argv[1], sys.argv[2:])
