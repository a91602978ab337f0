"""Judges a job in a separate process, forked from one with all imports, which ends with the job.

Libraries look at the variables of `strategy.exact: portable` when they are loaded, so jobs that ask for it are forked
from a process that was started with these variables.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import shutil
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from crossed.draw import Case
from crossed.job import Job, job_of
from crossed.judge import Verdict
from lockstep.config import processor

KEPT = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL"}
KEPT |= {"DS_ACCELERATOR", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "CROSSED_KEEP", *processor.VARIABLES}
KEPT |= {"LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"}


def judged(drawn: Case | Job, limit_s: float = 3600, plant: str = "") -> Verdict:
    """Return the verdict of a job, judged in a separate process, forked from one with all imports. `plant`: a
    fault of `plants.py`."""
    from support.harness import _context, server_environment

    if (drawn.run["strategy"].get("exact") if isinstance(drawn, Job) else drawn["exact"]) == "portable":
        server = _portable_server()
        server.send((drawn, limit_s, plant))
        answer: Verdict = server.recv()
        return answer
    server_environment()
    return _of_process(_context, drawn, limit_s, plant)


@functools.cache
def _portable_server() -> Connection:
    """Return the connection to `_serve` in a process that was started with the variables of portable runs."""
    from support.harness import first_environment

    ours, theirs = multiprocessing.Pipe()
    with first_environment(**processor.VARIABLES):
        multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,)).start()
    theirs.close()
    atexit.register(ours.close)  # before it is waited for
    return ours


def _serve(connection: Connection) -> None:
    from support.harness import PRELOADED

    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        connection.send(_of_process(multiprocessing.get_context("fork"), *asked))


def _of_process(context: Any, drawn: Case | Job, limit_s: float, plant: str) -> Verdict:
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="crossed-") as folder:
        process = context.Process(target=_judge, args=(drawn, folder, sending, plant))
        process.start()
        sending.close()
        try:
            late = Verdict("finding", "it ends", f"no verdict within {limit_s:.0f} s")
            verdict: Verdict = receiving.recv() if receiving.poll(limit_s) else late
        except EOFError:
            process.join(10)
            verdict = Verdict("finding", "the generator itself works", f"the judge ended with {process.exitcode}")
        process.join(5)
        process.kill()
        process.join()
    return verdict


def _judge(drawn: Case | Job, folder: str, sending: Any, plant: str) -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.setsid()
    for name in os.environ.keys() - KEPT:  # each text that is written is compared with each of them
        del os.environ[name]
    from crossed import plants
    from crossed.judge import judge

    if plant:
        getattr(plants, plant)()

    try:
        job = drawn if isinstance(drawn, Job) else job_of(drawn)
        verdict = judge(job, Path(folder))
    except BaseException:
        verdict = Verdict("finding", "the generator itself works", traceback.format_exc()[-1500:])
    os.chdir("/")
    sending.send(verdict)
    if keep := os.environ.get("CROSSED_KEEP"):
        shutil.copytree(folder, keep, dirs_exist_ok=True, symlinks=True)
