"""A verdict from a process of its own, which is forked from one that has imported everything and ends with its job."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any

from crossed.draw import Case
from crossed.job import Job, job_of
from crossed.judge import Verdict

KEPT = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL"}
KEPT |= {"DS_ACCELERATOR", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "CROSSED_KEEP"}


def judged(drawn: Case | Job, limit_s: float = 3600, plant: str = "") -> Verdict:
    """The verdict of a job, run in a process of its own, forked from one that has imported everything. `plant`: a
    fault of `plants.py`."""
    from support.harness import _context, server_environment

    server_environment()
    receiving, sending = _context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="crossed-") as folder:
        process = _context.Process(target=_judge, args=(drawn, folder, sending, plant))
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
