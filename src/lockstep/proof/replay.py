"""`lockstep replay OUTPUT --step N`: recompute a step of a finished run and compare it with what was recorded.

In: one OUTPUT and a step. Out: whether the recomputed steps have the recorded fingerprints, for any number of
processes, and the contents of the step: examples with their losses, gradient norms by layer, clipping. The ranks' side
is `replay_rank.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.output_files import require_output
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.config.sections import ALONE
from lockstep.data.job import Job
from lockstep.launchers import start
from lockstep.tasks.task import make_task
from lockstep.track.console import Console
from lockstep.track.history import lines_of
from lockstep.training import fingerprints
from lockstep.training.step_record import Difference, StepRecord, by_step, read_records, record_differences
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import StepBatch

JOB = "lockstep.proof.replay_rank.replay"
MOST_ROWS = 8  # examples and layers
# kind at the level `losses` -> its name; other kinds keep theirs
_NAMES = dict.fromkeys(("loss", "norm"), "loss or gradient norm")


def run_to_recompute(
    output: Path, overrides: Sequence[str] | Mapping[str, Any], strategy: str | None, processes: int
) -> Run:
    """Return the run of OUTPUT, changed so that `processes` local processes recompute it. `strategy`: a name; "own":
    that of the run; None: a replicated one if it gives the run's bits, else the run's. Errors: `RunError`."""
    require_output(output)
    trained = load(output / "run.yaml", overrides)
    if trained.model.trust_remote_code and "model.trust_remote_code" not in overrides_of(overrides):
        raise RunError(
            "LS8154",
            f"model.trust_remote_code: {output / 'run.yaml'} sets it, but code from a folder runs only if you "
            "set it too: read the code, then add model.trust_remote_code=true",
        )
    values: dict[str, Any] = trained.model_dump(mode="json")
    if strategy is None:
        exact = Job.of(trained).same_bits
        strategy = trained.strategy.name
        if exact:
            strategy = ALONE if processes == 1 else "ddp"
    if strategy not in ("own", trained.strategy.name):
        values["strategy"] |= {"name": strategy, "options": {}}
    fields = type(trained.launch).model_fields  # without those of its launcher
    values["launch"] = {k: v for k, v in values["launch"].items() if k in fields}
    values["launch"] |= {"name": "local", "processes": processes, "max_restarts": 0}
    if "launch.threads" not in overrides_of(overrides) and (threads := start_of(output).get("threads")):
        values["launch"]["threads"] = threads
    values |= {"track": {"console": "quiet"}, "max_time": None, "hub": {}, "profile": {}}
    return Run.model_validate(values).as_written(trained.written_keys)


def start_of(output: Path) -> dict[str, Any]:
    """Return the newest `start` event of OUTPUT, or an empty dict."""
    starts = [line for line in lines_of(output / "events.jsonl", ("event", "step")) if line["event"] == "start"]
    return starts[-1] if starts else {}


def what_of(differing: Sequence[Difference]) -> str:
    """Describe what differs in a step at the level `losses`."""
    return " and ".join(dict.fromkeys(_NAMES.get(each.kind) or str(each) for each in differing))


@contextmanager
def replayed(run: Run, output: Path, step: int, begin: int | None = None) -> Iterator[tuple[int, Path]]:
    """Replay a step; yield the exit status and the folder with the results, which is removed afterwards. Errors:
    `RunError`."""
    from lockstep.proof.replay_rank import RECORDS

    if step < 1:
        raise RunError("LS8155", f"--step: {step} is not a step of this run; steps count from 1")
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-", ignore_cleanup_errors=True) as folder:
        run = run.into(Path(folder) / "run")
        try:
            launcher, job = start.resolved(run)
        except RunError as caught:
            raise RunError(caught.code, f"{caught.message}{recorded_line(output, step)}") from caught
        words = (JOB, str(output.resolve()), str(step), str(step if begin is None else begin))
        status = start.start_ranks(launcher, job, words)
        yield status or int(not (run.folder / RECORDS).exists()), run.folder


def recorded_line(output: Path, step: int) -> str:
    """Return the recorded numbers of a step that cannot be recomputed, for a message; empty if there are none."""
    recorded = by_step(fingerprints.recorded(output)).get(step)
    if recorded is None:
        return ""
    return f"; recorded for step {step}: loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r}"


def replay(
    output: Path, step: int, overrides: Sequence[str], strategy: str | None, processes: int, begin: int | None
) -> int:
    """Recompute a step and print it. Returns 0 if all recomputed steps have the recorded fingerprints, 1 if not, or the
    exit status of a job that failed. Errors: `RunError`."""
    from lockstep.proof.replay_rank import RECORDS

    if start.joining():
        raise RunError(
            "LS8156", "lockstep replay starts its own processes; run it without torchrun or another launcher"
        )
    run, console = run_to_recompute(output, overrides, strategy, processes), Console(True)
    with replayed(run, output, step, begin) as (status, folder):
        if status:
            return status
        about, records = read_records(folder / RECORDS)
    for note in about["notes"]:
        console.note(note)
    began = f"the checkpoint of step {about['from']}" if about["from"] else "the start"
    how = f"{run.strategy.name}, {quantity(processes, 'process')}, {quantity(run.launch.threads, 'thread')} each"
    console.say(f"step {step} of {about['total']}, recomputed from {began} ({how})")
    same = tell_steps(console, records, fingerprints.recorded(output), run.skips_nonfinite)
    tell_step(console, about["step"], texts_of(Job.of(run), about["step"]["rows"]))
    return int(not same)


def tell_steps(console: Console, now: Sequence[StepRecord], then: Sequence[StepRecord], skips: bool = False) -> bool:
    """Print whether all recomputed steps match their records, or the first that does not; return whether all match."""
    computed, known = [record for record in now if record.hash is not None], by_step(then)
    compared = [known[record.step] for record in computed if record.step in known]
    hashed = sum(record.weights is not None for record in compared)
    if (wrong := first_mismatch(now, then, skips)) is not None:
        console.say(f"DIFFERENT from what was trained: {wrong}")
    elif compared:
        console.say(
            f"{len(compared)} of {len(computed)} steps were recorded; all have the same bits (weights: {hashed})"
        )
    else:
        console.note(f"{fingerprints.FILE} has none of these steps, so they are shown but not compared")
    return wrong is None


def first_mismatch(now: Sequence[StepRecord], then: Sequence[StepRecord], skips: bool = False) -> str | None:
    """Describe the first recomputed step that differs from its record or is not finite; None if there is none.
    `skips`: whether the run skips steps that are not finite."""
    known = by_step(then)
    for record in now:
        former = known.get(record.step, StepRecord(record.step))
        for which, each in (("recomputed", record), ("recorded", former)):
            if (fault := each.fault(skips)) is not None:
                return f"step {record.step}, {which}: {fault}"
        differing = record_differences(former, record)
        if differing and record.hash is None:
            return f"{what_of(differing)} of the checkpoint of step {record.step} differ from those of that step"
        if differing:
            return (
                f"in step {record.step} {what_of(differing)} differ (loss {record.loss!r} now, {former.loss!r} then; "
                f"gradient norm {record.grad_norm!r} now, {former.grad_norm!r} then)"
            )
    return None


def tell_step(console: Console, step: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Print the examples with the highest losses, the layers with the largest gradients, and the clipping. `texts`: the
    beginnings of the examples."""
    where = {place: m for m, group in enumerate(step["micro_batches"]) for place in group}
    order = sorted(range(len(step["rows"])), key=lambda i: -step["losses"][i])
    rows = [
        [str(step["rows"][i]), str(where[i]), str(step["tokens"][i]), f"{step['losses'][i]:.4f}", texts[i]]
        for i in order[:MOST_ROWS]
    ]
    mean = sum(step["losses"]) / max(1, len(step["losses"]))
    console.table(
        f"the {len(rows)} of {len(order)} examples with the highest losses, each alone and without dropout (mean "
        f"{mean:.4f})",
        ["row", "micro-batch", "length", "loss", "text"],
        rows,
        key="examples",
    )
    norms = sorted(step["layers"].items(), key=lambda pair: -pair[1])
    largest = [[name, f"{norm:.6g}"] for name, norm in norms[:MOST_ROWS]]
    console.table(
        f"gradient norms, the {len(largest)} largest of {len(norms)} layers", ["layer", "norm"], largest, key="layers"
    )
    whole = sum(norm**2 for norm in step["norms"].values()) ** 0.5
    limit = step["clip"]
    clipped = f"clipped to {limit:g}: times {limit / whole:.4g}" if step["clipped"] else "not clipped"
    console.say(f"gradient norm {whole:.6g}, {clipped}; learning rate {step['learning_rate']:g}")


def texts_of(job: Job, rows: Sequence[int]) -> list[str]:
    """Return the decoded beginnings of training examples; empty strings if the task has no tokens."""
    if job.task.own_model:
        return [""] * len(rows)
    task = make_task(job.with_data())
    columns, tokenizer = task.splits["train"], getattr(task, "tokenizer", None)
    if tokenizer is None or "input_ids" not in columns.names:
        return [""] * len(rows)
    ids = columns.ragged("input_ids")
    return [" ".join(tokenizer.decode(ids.row(r)[:64], skip_special_tokens=True).split())[:60] for r in rows]


# -- from Python -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A recomputed step of a run."""

    step: int  # updates done after it
    model: nn.Module  # with the weights from before the step, in training mode, float32 on the CPU
    batch: StepBatch  # all micro-batches of the step
    gradients: Mapping[str, Tensor]  # of the whole step, before clipping, by parameter name
    losses: Mapping[int, float]  # row of the training split -> its loss per target, alone and without dropout
    same: bool  # whether all recomputed steps have the recorded fingerprints, if any were recorded


def open_replay(
    output: Path, step: int, overrides: Mapping[str, Any], processes: int, strategy: str | None
) -> Replayed:
    """Recompute a step, for callers in Python. Errors: `RunError`."""
    import torch
    from safetensors.torch import load_file

    from lockstep.proof.replay_rank import GRADIENTS, RECORDS, WEIGHTS
    from lockstep.training.data_loader import StepLoader

    run = run_to_recompute(output, overrides, strategy, processes)
    with replayed(run, output, step) as (status, folder):
        if status:
            raise RunError("LS8157", f"replay of {output}: it ended with status {status}; see its output above")
        about, records = read_records(folder / RECORDS)
        weights, gradients = load_file(folder / WEIGHTS), load_file(folder / GRADIENTS)
    task = make_task(Job.of(run).with_data())
    model = task.model()
    model.load_state_dict(weights, strict=False)  # non-persistent buffers are in no checkpoint
    feed = StepLoader(task, range(run.micro_batches), torch.device("cpu"))
    losses = dict(zip(about["step"]["rows"], about["step"]["losses"], strict=True))
    same = tell_steps(Console(False), records, fingerprints.recorded(output), run.skips_nonfinite)
    return Replayed(step, model.train(), feed.make(step - 1), gradients, losses, same)
