"""The Python interface: `train`, `fit`, `evaluate`, `predict`, `verify`, `replay`, `load`.

In: a `Run`, or an output folder. Out: small frozen values. Errors are exceptions; no function ends this process. Each
job runs in separate processes, so it leaves no threads, signal handlers, process groups or memory in the caller. The
functions also work in notebooks and in scripts without a `__main__` guard. Imports no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.config import plugins
from lockstep.config.errors import STOPPED
from lockstep.config.run import Run, RunError, overrides_of
from lockstep.lab import event_stream, import_path
from lockstep.lab.event_stream import Event, Following
from lockstep.lab.subprocess_job import Child
from lockstep.launchers import start
from lockstep.track import history
from lockstep_trace import streams


class JobFailed(Exception):
    """Raised if the processes of a job fail; `str(error)` is what they wrote to standard error."""


@dataclass(frozen=True)
class Result:
    """What `train` and `fit` return: status, output folder, metrics and export of a run."""

    status: Literal["done", "stopped", "submitted"]  # stopped: repeat the call to resume; submitted: queued
    folder: Path  # OUTPUT
    metrics: Mapping[str, Mapping[str, float]] = field(repr=False)
    """Split -> name -> value, with the step they are of: of the exported model once there is one, else the last."""
    export: Path | None  # folder for `from_pretrained`; None until the run is done

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, each with `step` and `split`, ready for `pandas.DataFrame`."""
        return list(history.lines_of(self.folder / "metrics.jsonl", ("step", "split")))


@dataclass(frozen=True)
class Verdict:
    """What `verify` returns: whether the steps under the run's strategy equal those of one process."""

    agrees: bool  # whether there is no difference beyond `promise`
    promise: Literal["bits", "rounding"]  # the equality that the strategy guarantees
    differences: tuple[str, ...]  # a sentence for each difference beyond `promise`, then a likely cause


def train(
    run: Run,
    show: Callable[[str], object] | None = print,
    on_event: Callable[[Event], object] | None = None,
) -> Result:
    """Train a run to its end, resuming from the newest checkpoint if there is one.

    A finished run is not trained again. If its `epochs` or `steps` were raised, training continues from its export in a
    new folder, `Result.folder`.

    `show`: called with each line that `lockstep train` prints; None prints nothing. `on_event`: called with an `Event`
    for each logged step, evaluation, checkpoint and so on, within about 0.1 s. A notebook also shows a progress bar,
    unless `show` is None. An exception in either callback kills the job. On Ctrl-C (a notebook's stop button) the job
    writes a checkpoint before `KeyboardInterrupt` propagates.

    Errors: `RunError` for bad input, `JobFailed` if training fails.
    """
    _begins()
    _importable(run)
    run = start.continued_as_new_run(run, streams.say if show is print else show or (lambda text: None))
    start.plan_of(run, start.launcher_of(run.launch))
    following = Following(run.folder)
    listening = [
        each for each in (on_event, event_stream.bar(run.checkpoint.best) if show else None) if each is not None
    ]

    def tell(events: Iterable[Event]) -> None:
        for event in events:
            for listener in listening:
                listener(event)

    with _written(run) as path:
        follow = (lambda: tell(following.new())) if listening else None
        status = _job("lockstep.cli.main", ["train", str(path)], show, follow=follow)
    result = _result(run.folder, status)
    tell([following.end(result.status)])
    return result


def fit(
    model: Callable[..., Any],
    data: Any,
    loss: Callable[[Any, Any], Any],
    *,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = 64,
    micro_batches: int | None = None,
    learning_rate: float | None = None,
    strategy: str = "ddp",
    processes: int | Literal["auto"] = "auto",
    metrics: Callable[[Any, Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    length: Callable[[Any], int] | None = None,
    targets: Callable[[Any], int] | None = None,
    generate: Callable[[Any, Any], Any] | None = None,
    name: str | None = None,
    output: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    show: Callable[[str], object] | None = print,
    on_event: Callable[[Event], object] | None = None,
) -> Result:
    """Train your own `torch.nn.Module` without a run file (docs/how-to/own-module.md).

    Equals a run with `task: {name: module}`. Define each callable at the top level of a script or module: every process
    imports it.

    `model`: returns a `torch.nn.Module`. `data`: mapping of split -> data set, or a function that returns one.
    `loss`(outputs, batch): the sum over targets, their mean, or one number per target, as a tensor.
    `epochs`, `steps`: give one; a step is one optimizer update. `batch_size`: examples per step, over all processes.
    `micro_batches`: pieces of a step; default 8, at most `batch_size`. Another number changes the bits.
    `metrics`(outputs, batch): name -> number. `generate`(model, batch): a text for each example.
    `collate`(items): a batch; default: torch's. `length`, `targets`(item): its cost; its targets; default: 1.
    `name`: default: the module that defines the model. `output`: folder; default: outputs/NAME.
    `overrides`: further keys of the run file. `show`, `on_event`: see `train`.

    Errors: `RunError`, `JobFailed`.
    """
    _begins()
    own = {"model": model, "data": data, "loss": loss, "metrics": metrics, "collate": collate}
    own |= {"length": length, "targets": targets, "generate": generate}
    task = {key: import_path.name_of(thing, key) for key, thing in own.items() if thing is not None}
    values: dict[str, Any] = {
        "name": name or task["model"].split(".")[-2],
        "output": None if output is None else str(output),
        "task": {"name": "module"} | task,
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "micro_batches": min(8, batch_size) if micro_batches is None else micro_batches,
        "strategy": {"name": strategy},
        "launch": {"processes": processes},
        "optim": {} if learning_rate is None else {"learning_rate": learning_rate},
    }
    return train(Run.load(values, overrides), show, on_event)


def load(output: Result | Path | str) -> Any:
    """Load the trained `torch.nn.Module` of a run of the task `module`, in evaluation mode.

    `output`: an output folder or its export. Imports and runs the code that defines the model in this process. Errors:
    `RunError`."""
    from lockstep.checkpoint import export_hashes
    from lockstep.tasks.modules import wrapped_module

    folder = _folder(output)
    export_hashes.require_whole_source(str(folder))
    return wrapped_module.load(folder / "export" if (folder / "export").is_dir() else folder)


def evaluate(
    output: Result | Path | str, split: str | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, dict[str, float]]:
    """Evaluate the exported model of an output folder, and return split -> metric -> value.

    `split`: default: validation, and test if there is one.
    `overrides`: keys of the run file, such as `{"task.beams": 4}`. Errors: `RunError`, `JobFailed`.
    """
    _begins()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        scores_path = Path(folder) / "scores.json"
        words = [str(scores_path), str(_folder(output)), json.dumps(split), json.dumps(overrides_of(overrides or {}))]
        _job("lockstep.api._evaluate", words, None)
        return json.loads(scores_path.read_text(encoding="utf-8"))


def predict(
    output: Result | Path | str,
    texts: str | Sequence[str | Sequence[str] | Mapping[str, str]],
    overrides: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Predict with an exported model and return one mapping per text: its input columns and the prediction.

    A classification has `label`, `score` and the `scores` of all labels; a translation has `translation`, a language
    model `written`, token classification `words`.

    `output`: an output folder, or an exported checkpoint. `texts`: one text, or a list of texts, text pairs or
    mappings of column -> text. Errors: `RunError`, `JobFailed`.
    """
    _begins()
    listed = [texts] if isinstance(texts, str) else list(texts)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        texts_path, answers_path = Path(folder) / "texts.json", Path(folder) / "answers.json"
        texts_path.write_text(json.dumps(listed), encoding="utf-8")
        words = [str(answers_path), str(_folder(output)), str(texts_path), json.dumps(overrides_of(overrides or {}))]
        _job("lockstep.api._predict", words, None)
        return json.loads(answers_path.read_text(encoding="utf-8"))


def verify(run: Run, steps: int = 5, show: Callable[[str], object] | None = print) -> Verdict:
    """Compare the first `steps` steps under the run's strategy with the same steps on one process.

    Loss, gradient norm, gradients and weights are compared after each step. Starts the processes itself, and writes
    nothing to the output folder.

    Errors: `RunError`, `JobFailed`.
    """
    if steps < 1:
        raise RunError("LS0002", f"steps: invalid value {steps}; expected an integer >= 1")
    _begins()
    _importable(run)
    with _written(run) as path:
        verdict_path = path.with_name("verdict.json")
        _job("lockstep.api._verify", [str(verdict_path), str(path), str(steps)], show, (0, 1))
        if not verdict_path.exists():
            raise JobFailed("verify found nothing to compare")
        values = json.loads(verdict_path.read_text(encoding="utf-8"))
    return Verdict(values["agrees"], values["promise"], tuple(values["differences"]))


def replay(
    output: Result | Path | str,
    step: int,
    processes: int = 1,
    strategy: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Recompute a step of a run, starting from the nearest checkpoint before it.

    Returns an object with `model` (weights before the step, float32, on the CPU), `batch` (all micro-batches),
    `gradients` (parameter name -> gradient of the whole step, before clipping), `losses` (row of the training split ->
    loss per target, without dropout), and `same`: whether the recomputed fingerprints equal the recorded ones. Builds
    the model and runs its code in this process.

    `step`: counted from 1. `processes`: how many recompute the step. `strategy`: default: one that gives the run's
    bits.

    Errors: `RunError`."""
    from lockstep.proof.replay import open_replay

    _begins()
    return open_replay(_folder(output), step, overrides or {}, processes, strategy)


# -- in the caller's process ------------------------------------------------------------------------------------------


def _folder(output: Result | Path | str) -> Path:
    return output.folder if isinstance(output, Result) else Path(output)


def _begins() -> None:
    """Record the start of a job. Errors: `Reached` if a job is importing the script that contains this call."""
    plugins.starts_a_job()
    import_path.begins()


def _importable(run: Run) -> None:
    """Reject plug-in classes defined in `__main__`, which other processes cannot import. Errors: `RunError`, and
    `TypeError` for a path instead of a run."""
    if not isinstance(run, Run):
        raise TypeError(f"run: {run!r} is not a Run; use lockstep.Run.load(path)")
    names = {"task.name": run.task.name, "strategy.name": run.strategy.name, "launch.name": run.launch.name}
    for key, name in [*names.items(), *(("track.to", name) for name in run.track.to)]:
        if name.startswith("__main__."):
            raise RunError(
                "LS0001",
                f"{key}: {name} is defined in this session, so other processes cannot import it; put the class "
                "in a file, my_module.py, and give my_module.Class",
            )


@contextmanager
def _written(run: Run) -> Iterator[Path]:
    """Write the run to a temporary file, outside OUTPUT, which may hold another run."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(run.dump(), encoding="utf-8")
        yield path


def _job(
    function: str,
    words: Sequence[str],
    show: Callable[[str], object] | None,
    fine: tuple[int, ...] = (0, STOPPED),
    follow: Callable[[], object] | None = None,
) -> int:
    """Run a function in a child process until it ends, and return its exit status if that is in `fine`.

    `follow`: called about every 0.1 s, and once after the end. Errors: `RunError` for status 2, `JobFailed` for any
    other status outside `fine`."""
    show = streams.say if show is print else show  # a terminal that cannot show a character must not end the job
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        child = Child(function, words, Path(folder), "job")
        try:
            over = False
            while not over:
                over = child.wait(0.1)
                _show(child, show)
                if follow is not None:
                    follow()
        except KeyboardInterrupt:
            child.stop()
            try:
                child.wait()  # it writes a checkpoint
            except KeyboardInterrupt:
                child.kill()
            _show(child, show)
            raise
        except BaseException:
            child.kill()
            raise
        if child.status in fine:
            if show is not None and (warned := child.errors):
                show(warned)
            return int(child.status or 0)
        message = child.errors or f"ended with status {child.status}"
        raise RunError.read(message) if child.status == 2 else JobFailed(message)


def _show(child: Child, show: Callable[[str], object] | None) -> None:
    for line in child.lines():
        if show is not None:
            show(line)


def _result(folder: Path, status: int) -> Result:
    export = folder / "export"
    metrics: dict[str, dict[str, float]] = {}
    for line in history.lines_of(folder / "metrics.jsonl", ("step", "split")):
        metrics[line["split"]] = {k: v for k, v in line.items() if k != "split" and isinstance(v, int | float)}
    done = status == 0 and export.is_dir()
    if done and (scores := history.scores_of(folder)):
        metrics |= {split: {"step": scores["step"], **split_scores} for split, split_scores in scores["splits"].items()}
    state: Literal["done", "stopped", "submitted"] = "stopped" if status == STOPPED else "submitted"
    if done:
        state = "done"
    return Result(state, folder, metrics, export if done else None)


# -- in the child process --------------------------------------------------------------------------------------------


def _evaluate(words: list[str]) -> int:
    from lockstep.training.evaluate_export import scores

    result_path, output, split, overrides = words
    _, values = scores(Path(output), json.loads(split), json.loads(overrides))
    Path(result_path).write_text(json.dumps(values), encoding="utf-8")
    return 0


def _predict(words: list[str]) -> int:
    from lockstep.training.predicting import predictions

    answers_path, output, texts_path, overrides = words
    texts = json.loads(Path(texts_path).read_text(encoding="utf-8"))
    answers = list(predictions(Path(output), texts, json.loads(overrides)))
    Path(answers_path).write_text(json.dumps(answers), encoding="utf-8")
    return 0


def _verify(words: list[str]) -> int:
    from lockstep.proof.verify import verify

    verdict_path, path, steps = words
    return verify(Run.load(path), int(steps), Path(verdict_path))
