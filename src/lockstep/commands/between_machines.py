"""Commands that serve other machines: `lockstep rendezvous` runs the rendezvous server, and does not train.

In: the parser, then the parsed command line. Out: an exit status.
"""

from __future__ import annotations

import argparse
import signal
import threading

from lockstep.config.run import RunError
from lockstep.distributed import network
from lockstep.track.console import Console


def rendezvous_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="an address of this machine, as in launch.rendezvous")


def run_rendezvous(args: argparse.Namespace) -> int:
    from lockstep.launchers.processes.elastic_rendezvous import serve

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        store = serve(*network.endpoint(args.address))
    except network.NetworkError as caught:
        raise RunError(caught.code, caught.message) from None
    Console(True).say(f"serving the rendezvous of jobs with launch.rendezvous={args.address}; Ctrl-C ends it")
    over.wait()
    del store
    return 0
