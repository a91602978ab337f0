"""Runs the ranks of a job, forked from a process with all imports, and records what they do.

In: a folder with a run file, a number of ranks, and when they stop. Out: the status of each rank, the examples of each
step and of each evaluation, and what the ranks wrote into OUTPUT.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 900  # of a job; so that one that hangs ends. A compiled one took 300 s on a machine with a load of 12
STOPPED = 75


@dataclass
class Watched:
    """The observed behaviour of one job."""

    statuses: list[int | None]
    fault: str = ""  # a rank's traceback, or that it hangs
    refusal: str = ""  # what a rank refused, which should have been refused before
    steps: dict[int, list[int]] = field(default_factory=dict)  # step -> its examples
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # split, rows asked for, rows scored


def run_ranks(
    folder: Path, overrides: list[str], ranks: int, stop: int = 0, how: str = "stop", keep: bool = False
) -> Watched:
    """Run `folder/run.yaml` on `ranks` processes. `stop`: number of steps after which all ranks are stopped or killed
    (`how`); 0: never. `keep`: write the steps of a single rank to `folder/plain`."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (ranks, f"file://{meeting}/meet", folder, overrides, stop, how, keep, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        watched = Watched([None] * ranks)
        try:
            said = _answers(processes, results, ranks, how == "kill" and stop > 0)
        finally:
            for process in processes:
                process.join(0.2)
                process.kill()
                process.join()
        for rank, answer in said.items():
            watched.statuses[rank] = answer.get("status")
            watched.fault = watched.fault or answer.get("fault", "")
            watched.refusal = watched.refusal or answer.get("refusal", "")
            watched.steps |= {int(step): ids for step, ids in answer.get("steps", {}).items()}
        watched.evaluations = _merged([answer.get("evaluations", []) for answer in said.values()])
        killed = how == "kill" and stop > 0
        if len(said) < ranks and not killed and not watched.fault and not watched.refusal:
            watched.fault = f"no answer of {ranks - len(said)} of {ranks} ranks within {LIMIT_S} s"
        return watched


def _answers(processes: list[Any], results: Any, ranks: int, killed: bool) -> dict[int, dict[str, Any]]:
    """Collect the ranks' answers until all have answered or one has failed."""
    said: dict[int, dict[str, Any]] = {}
    waited = 0.0
    while len(said) < ranks and waited < LIMIT_S:
        try:
            rank, answer = results.get(timeout=0.5)
        except queue.Empty:
            waited += 0.5
            if not any(process.is_alive() for process in processes):
                break  # killed, all of them
            continue
        said[rank] = answer
        if answer.get("fault") or answer.get("refusal"):
            break  # the others may wait for it in a collective
    return said


def _merged(evaluations: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Evaluations of all ranks, which enter them in the same order."""
    found = []
    for each in zip(*evaluations, strict=False):
        of_replica = {one["replica"]: one["scored"] for one in each}  # ranks of one pipeline score the same rows
        scored = sorted(row for rows in of_replica.values() for row in rows)
        agree = all(one["scored"] == of_replica[one["replica"]] for one in each)
        found.append({"split": each[0]["split"], "asked": each[0]["asked"], "scored": scored, "agree": agree})
    return found


# -- in a rank -------------------------------------------------------------------------------------------------------


def _rank(
    rank: int,
    ranks: int,
    meet: str,
    folder: Path,
    overrides: list[str],
    stop: int,
    how: str,
    keep: bool,
    results: Any,
) -> None:
    os.chdir(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    seen: dict[str, Any] = {"steps": {}, "evaluations": []}
    log = open(folder / f"rank-{rank}.txt", "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = log, log
    from lockstep.config.run import RunError

    try:
        seen["status"] = _trained(meet, overrides, stop, how, keep, seen)
    except RunError as caught:
        seen["refusal"] = str(caught)
    except BaseException:
        seen["fault"] = traceback.format_exc()
    results.put((rank, seen))
    results.close()
    results.join_thread()
    os._exit(0)


def _trained(meet: str, overrides: list[str], stop: int, how: str, keep: bool, seen: dict[str, Any]) -> int:
    from lockstep.config.run import load
    from lockstep.distributed.world import World
    from lockstep.training.resolve import for_rank
    from lockstep.training.train_job import train_job

    run = load("run.yaml", overrides)
    with _watching(seen, stop, how, keep):
        world = World(run, meet)
        status = train_job(for_rank(run, world), world)
        world.barrier()
        world.close()
    return int(status)


@contextlib.contextmanager
def _watching(seen: dict[str, Any], stop: int, how: str, keep: bool) -> Any:
    """Record the events of this rank. Does not change what it computes."""
    from lockstep.track.report import report
    from lockstep.training import evaluation, export_check
    from lockstep.training.data_loader import StepLoader
    from lockstep.training.train_job import RankZeroSinks

    checked = export_check.evaluated
    advance, summed, make = RankZeroSinks.advance, evaluation.sum_split, StepLoader.make

    def advanced(self: Any, step: int) -> None:
        advance(self, step)
        if stop and step == stop:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self._session.world.stop.came = True

    def watched(world: Any, task: Any, strategy: Any, columns: Any, rows: Any, *more: Any) -> Any:
        split = next((name for name, each in task.splits.items() if each is columns), "")
        scored: list[int] = []
        score_at = task.score_at

        def noted(forward: Callable[..., Any], batch: Any, columns: Any, chosen: np.ndarray) -> Any:
            scored.extend(map(int, chosen))
            return score_at(forward, batch, columns, chosen)

        task.score_at = noted
        try:
            return summed(world, task, strategy, columns, rows, *more)
        finally:
            del task.score_at
            of = strategy.data_parallel
            asked, replica = sorted(map(int, rows)), of.rank if of.size < world.size else world.rank
            seen["evaluations"].append({"split": split, "asked": asked, "scored": scored, "replica": replica})

    def evaluate_export(*arguments: Any) -> Any:
        """Leave out the scores of the export check, which scores a few examples and is no evaluation of a split."""
        before = len(seen["evaluations"])
        numbers = checked(*arguments)
        del seen["evaluations"][before:]
        return numbers

    def make_batch(self: Any, step: int, *more: Any) -> Any:
        batch = make(self, step, *more)
        seen["steps"][step] = [int(row) for row in batch.ids]
        return batch

    export_check.evaluated = evaluate_export
    report.write_report = lambda folder: None  # type: ignore[assignment]  # a fifth of what a rank takes
    RankZeroSinks.advance, evaluation.sum_split, StepLoader.make = advanced, watched, make_batch  # type: ignore[method-assign]
    if keep:
        _keeping(Path("plain"))
    yield


def _keeping(folder: Path) -> None:
    """Record what a job on one process trains, in the form that `lockstep.proof.against_plain` reads."""
    from lockstep.training import train_job

    train = train_job.train

    def train_and_keep(session: Any, state: Any) -> Any:
        _keep_steps(session, folder)
        return train(session, state)

    train_job.train = train_and_keep  # type: ignore[assignment]


def _keep_steps(session: Any, folder: Path) -> None:
    """Save the state before the first step, then gradient, loss, norm and state of every step. Saves nothing for a
    model with dropout that its config cannot disable (such as GPT-2's classifier)."""
    from torch import nn

    from lockstep.strategies.observer import GradientRecorder
    from lockstep.training import plain_sides as record

    if any(isinstance(module, nn.Dropout) and module.p for module in session.strategy.model.modules()):
        return
    strategy, feed, world = session.strategy, session.feed, session.world
    steps: list[Any] = []
    train_step, recorder = strategy.train_step, GradientRecorder(world)

    def trained(batch: Any, rate: float) -> Any:
        rows = [batch.ids[group] for group in feed.task.split_micro_batches(feed.columns, batch.ids)]
        hides = session.run.task.name == "masked_language_modeling"
        masked = record._masked(session, feed.columns, rows, batch.step) if hides else {}
        result = train_step(batch, rate)
        groups = [group.tolist() for group in rows]
        numbers = batch.step, float(result.loss), float(result.grad_norm)
        gradients = {f"gradient.{name}": tensor for name, tensor in recorder.gradients.items()}
        record.save_on_main(folder / f"step-{len(steps)}.safetensors", gradients | strategy.state.state_dict(), world)
        steps.append(record.PlainStep(*numbers, groups, masked))
        found = record.PlainRecord(str(Path(session.task.prepared.tokenizer)), feed.total, steps)
        (folder / record.FILE).write_text(json.dumps(asdict(found)))
        return result

    record.save_on_main(folder / "start.safetensors", strategy.state.state_dict(), world)
    strategy.observer, strategy.train_step = recorder, trained


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without speeds and other values that depend on the machine."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            found.append({k: v for k, v in values.items() if "per_s" not in k and "seconds" not in k})
    return found
