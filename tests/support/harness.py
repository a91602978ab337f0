"""Run a function on n gloo processes that rendezvous through a file: no ports, and torch is imported once.

In: a module-level function of a `World` and arguments. Out: its results in rank order.
"""

from __future__ import annotations

import faulthandler
import hashlib
import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks, cuda_graphs, region
from lockstep.strategies.strategy import Strategy, make_strategy
from lockstep.tasks.task import Task, make_task
from lockstep.training import reference_pass
from lockstep.training.data_loader import StepLoader
from lockstep.training.session import gloo_threads
from support.first_environment import AT_FIRST
from support.places import TESTS_PATH

PRELOADED = [
    "lockstep.training.fork_server",
    "transformers.models.gpt2.modeling_gpt2",
    "tokenizers",
    "support.harness",
    "support.forked",
    "support.engines",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
LEAN = f"{TESTS_PATH}/support/lean"  # first in PYTHONPATH: hides DeepSpeed from new interpreters

TINY = {
    "name": "tiny",
    "data": {"source": "builtin/emotion", "max_length": 32, "limit": 100},
    "model": {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}},
    "tokenizer": {"train": "bpe", "vocab_size": 400},
    "steps": 6,
    "batch_size": 22,
    "micro_batches": 8,
    "optim": {"learning_rate": 5e-3, "warmup_steps": 2, "max_grad_norm": 0.5},
    "launch": {"device": "cpu", "threads": 1},
}


def tiny(*overrides: str, **values: Any) -> Run:
    """A run of seconds: two small layers with dropout, effective clipping, and a short last step per epoch. `fsdp2`
    without options gathers for each micro-batch, as for a large model."""
    run = load(None, list(overrides), TINY | values)
    if run.strategy.name == "fsdp2" and not run.strategy.options:
        options = {"gather": "micro_batch"}
        return run.model_copy(update={"strategy": run.strategy.model_copy(update={"options": options})})
    return run


def build(run: Run, world: World) -> tuple[Task, Strategy]:
    """Task and built strategy of a run."""
    job = Job.of(run, world.size).with_data()
    task, strategy = make_task(job), make_strategy(job, world)
    strategy.build(task)
    blocks.warm_up(strategy, task)
    region.warm_up(strategy, task)
    cuda_graphs.warm_up(strategy, task)
    reference_pass.provide(world, task, strategy, job.data, trained=False)
    return task, strategy


def build_with_feed(run: Run, world: World) -> tuple[Task, Strategy, StepLoader]:
    """`build`, and the loader of this rank's steps."""
    task, strategy = build(run, world)
    return task, strategy, StepLoader(task, strategy.own_micro_batches(), world.device)


def digest(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over all tensors, in the order of their names."""
    seen = hashlib.sha256()
    for name in sorted(state):
        seen.update(name.encode())
        seen.update(state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def run_on(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    run: Run | None = None,
    timeout_s: float = 120,
    joined: bool = True,
) -> list[Any]:
    """Run `function(world, *arguments)` on each of `ranks` processes, which have joined unless the function does that
    itself. `run`: of the world; by default the first among the arguments, or in a list or mapping there, or `tiny()`.
    Errors: AssertionError with the first rank's traceback, and how silent ranks ended."""
    run = run or next(_runs_in(arguments), None) or tiny()
    server_environment()
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        processes = [
            _context.Process(
                target=_rank, args=(rank, ranks, f"file://{folder}/meet", run, joined, function, arguments, results)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < ranks:
                try:
                    rank, value, error = results.get(timeout=timeout_s)
                except queue.Empty:
                    raise AssertionError(f"no answer in {timeout_s:g} s\n{_ends(processes, folder)}") from None
                if error is not None:
                    raise AssertionError(f"rank {rank} of {ranks}:\n{error}{_ends(processes, folder)}")
                found[rank] = pickle.loads(value)
        finally:
            for process in processes:
                process.join(10 if len(found) == ranks else 0.1)
                process.kill()
        return [found[rank] for rank in range(ranks)]


def rank_0_of(
    ranks: int, function: Callable[..., dict[str, Any]], *arguments: Any, alike: tuple[str, ...], timeout_s: float = 120
) -> dict[str, Any]:
    """Return rank 0's result of `run_on`, after checking that the entries `alike` are equal on all ranks."""
    first, *others = run_on(ranks, function, *arguments, timeout_s=timeout_s)
    for other in others:
        assert {key: other[key] for key in alike} == {key: first[key] for key in alike}
    return first


def _runs_in(arguments: tuple[Any, ...]) -> Iterator[Run]:
    for each in arguments:
        several = each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else (each,)
        yield from (value for value in several if isinstance(value, Run))


_servers: set[int] = set()  # pids of fork servers that were started here


def server_environment() -> dict[str, str]:
    """Start the fork server of ranks and commands, unless it runs. One that lockstep started in this process, and one
    that starts again after a test killed it, lack its imports, and each rank would import the engines: they are
    replaced. Returns its initial variables."""
    server = forkserver._forkserver
    with first_environment():
        if server._forkserver_pid not in _servers:
            server._stop()  # type: ignore[attr-defined]
        _context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        _servers.add(server._forkserver_pid)  # type: ignore[arg-type]
        return dict(os.environ)


@contextmanager
def first_environment(**variables: str) -> Iterator[None]:
    """Context in which this process has its initial variables, and the given ones, for starting a server."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - AT_FIRST.keys():
            patch.delenv(name)
        for name, value in (AT_FIRST | variables).items():
            patch.setenv(name, value)
        # Python 3.11 gives the server no path to `engines`
        patch.setenv("PYTHONPATH", TESTS_PATH, prepend=os.pathsep)
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command sets it before importing torch
        yield


def _ends(processes: list[Any], folder: str) -> str:
    """How each rank has ended so far (negative: a signal) and where a signaled rank was: the first error that arrives
    may come from a rank that only lost another one."""
    for process in processes:
        process.join(0.5)
    said = [f"exit status of ranks: {[process.exitcode for process in processes]}"]
    for rank in range(len(processes)):
        place = Path(folder) / f"fault-{rank}"
        if place.exists() and (text := place.read_text()):
            said.append(f"rank {rank}: {text}")
    return "\n".join(said)


def _rank(
    rank: int,
    ranks: int,
    meet: str,
    run: Run,
    joined: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    faults = (Path(meet.removeprefix("file://")).parent / f"fault-{rank}").open("w")
    faulthandler.enable(faults)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        world = World(run, meet)
        if joined:
            world.gloo_threads = gloo_threads(Job.of(run))
            world.join()
        value = function(world, *arguments)
        world.barrier()
        world.close()
        results.put((rank, pickle.dumps(value), None))  # pickled, because this process may end before it is read
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def lockstep_environment(cache: Path) -> dict[str, str]:
    """Environment of a `lockstep` command in a test."""
    return {**os.environ, "LOCKSTEP_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def lean() -> dict[str, str]:
    """Variables that hide DeepSpeed from new interpreters."""
    return {"PYTHONPATH": os.pathsep.join([LEAN, *filter(None, [os.environ.get("PYTHONPATH")])])}


def works(world: World, run: Run) -> int:
    """Run as a rank; returns its exit status."""
    from lockstep.training.resolve import for_rank
    from lockstep.training.train_job import train_job

    return train_job(for_rank(run, world), world)
