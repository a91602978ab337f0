"""`lockstep sweep`: run several trials, in sequence or in parallel; finished trials are not repeated.

In: a `Sweep`. Out: a folder with a subfolder per trial (with a plain run file: `lockstep train FOLDER/run.yaml` is the
trial), `sweep.json`, `comparison.html`, and a table on the terminal.

Trials run in slots that share the processes and GPUs of this machine (`local`), or as one SLURM array job with a task
per trial. Steps that several trials have in common are computed once: a trial keeps a checkpoint where others branch
off (`checkpoint.at`).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import Goal, changed_code, code_of, folder_of, newest_first, read_manifest
from lockstep.checkpoint.manifest import name_of as checkpoint_of
from lockstep.config import plugins
from lockstep.config.error_messages import value_text
from lockstep.config.errors import STOPPED
from lockstep.config.output_files import replace_text
from lockstep.config.run import Run, RunError, write_run_yaml
from lockstep.config.sections import LaunchSection
from lockstep.data.job import Job, arithmetic_of
from lockstep.data.source import files_of
from lockstep.distributed import job_record
from lockstep.lab.subprocess_job import Child, asked_to_stop
from lockstep.lab.sweep import sweep_file
from lockstep.lab.sweep.sweep_file import Sweep, name_of
from lockstep.launchers import slurm, start
from lockstep.launchers.local import processes_of
from lockstep.track import history
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console, clock
from lockstep.track.report.report import write_comparison
from lockstep.training.resolve import fitted
from lockstep.training.shared_prefix import OF_STEPS, Course, course, parting, shares_nothing
from lockstep_trace.coded import quantity

FILE = "sweep.json"


@dataclass
class SweepTrial:
    """One run of the sweep."""

    name: str
    keys: Mapping[str, Any]
    run: Run
    state: str = "to do"  # to do, begun, waiting, running, done, submitted, stopped, failed
    reason: str = ""  # of a failure
    seconds: float = 0.0  # spent on it by this sweep
    scores: dict[str, float] = field(default_factory=dict)  # latest scores on the sweep's split

    def look(self, split: str) -> None:
        """Read the trial's folder. Errors: `RunError` if it belongs to another run."""
        newest = next((manifest for _, manifest in newest_first(self.run.folder)), None)
        if newest is not None:
            now = arithmetic_of(self.run)
            if differing := sorted(k for k in now if newest.arithmetic.get(k) != now[k]):
                key = differing[0]
                then = value_text(newest.arithmetic.get(key))
                raise RunError(
                    "LS8350",
                    f"{self.run.folder} contains a trial of another run file ({key}: {then} there, "
                    f"{value_text(now[key])} now); give another --out, or remove that folder",
                )
            code = code_of(self.run.task, self.run.optim, self.run.strategy)
            if self.run.checkpoint.changed_code == "refuse" and (files := changed_code(code, newest)):
                raise RunError(
                    "LS8351",
                    f"{self.run.folder} contains a trial of other code ({', '.join(files)} changed since); give "
                    "another --out, remove that folder, or set checkpoint.changed_code=allow to keep it",
                )
        lines = history.lines_of(self.run.folder / "metrics.jsonl", ("step", "split"))
        for line in lines:
            if line["split"] == split:
                self.scores = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
        if Goal.of(self.run).met_by(newest):
            self.state = "done"
            # The exported model may not be the last one.
            exported = history.scores_of(self.run.folder).get("splits", {}).get(split)
            self.scores = exported if isinstance(exported, dict) else self.scores
        elif newest is not None:
            self.state = "begun"


class Leaderboard:
    """The known trials of a sweep; a search adds more."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self.sweep, self.console = sweep, console
        self.slots = Slots(sweep)
        self.trials: list[SweepTrial] = []
        self.tree: Tree | None = None  # of steps that trials have in common
        self._tried: set[str] = set()  # trials of this sweep; a failed one is not retried
        listed = sweep.combinations() if sweep.search is None else _known(sweep)
        for keys in listed:
            self.add(keys)

    def add(self, keys: Mapping[str, Any]) -> SweepTrial:
        """Add a trial: load and plan its run. Errors: `RunError`."""
        name = name_of(keys, {trial.name for trial in self.trials})
        run = planned(self.sweep, {**keys, **self.slots.keys(keys)}, name)
        trial = SweepTrial(name, keys, run)
        trial.look(self.sweep.split)
        self.trials.append(trial)
        return trial

    def next(self) -> SweepTrial | None:
        """Return the next trial to start, interrupted ones first."""
        for state in ("begun", "to do"):
            for trial in self.trials:
                if trial.state == state and trial.name not in self._tried and not self._waits(trial):
                    self._tried.add(trial.name)
                    return trial
        search = self.sweep.search
        if search is None or len(self.trials) >= search.trials:
            return None
        results = [(t.keys, self.metric(t)) for t in self.trials if t.state in ("done", "running")]
        for seed in range(search.seed, search.seed + 100 * search.trials, search.trials):
            keys = sweep_file.propose(self.sweep.over, results, seed, not self.sweep.metric.startswith("-"))
            if all(dict(t.keys) != keys for t in self.trials):
                trial = self.add(keys)
                self._tried.add(trial.name)
                return trial
        return None  # every proposal repeats a trial: the values are exhausted

    def share(self) -> None:
        """Find trials with common first steps, and make the shared ones keep checkpoints."""
        submits = start.launcher_of(self.sweep.base.launch).submits
        if not self.sweep.share or self.sweep.search is not None or submits or len(self.trials) < 2:
            return

        self.tree = shared_steps({trial.name: trial.run for trial in self.trials})
        for trial in self.trials:
            at = sorted({*trial.run.checkpoint.at, *self.tree.left_at(trial.name)})
            checkpoint = trial.run.checkpoint.model_copy(update={"at": at})
            trial.run = trial.run.model_copy(update={"checkpoint": checkpoint})
        if self.tree.summary:
            self.console.say(f"shared     {self.tree.summary}")

    def begin(self, trial: SweepTrial) -> str:
        """Copy the steps that another trial has computed, if any. Returns a text for the user."""
        if self.tree is None or trial.state != "to do" or trial.name not in self.tree.begins:
            return ""
        try:
            return f" {self.tree.begin(trial.name, {each.name: each.run for each in self.trials})}"
        except RunError as caught:
            self.console.note(f"trial {trial.name} is computed from the start: {caught}")
            return ""

    def _waits(self, trial: SweepTrial) -> bool:
        """Return whether this trial waits for another one that computes its first steps."""
        if self.tree is None or trial.state != "to do" or trial.name not in self.tree.begins:
            return False
        name, step = self.tree.begins[trial.name]
        other = next(each for each in self.trials if each.name == name)
        there = folder_of(other.run.folder) / checkpoint_of(step)
        return other.state in ("to do", "begun", "running") and isinstance(read_manifest(there), str)

    def metric(self, trial: SweepTrial) -> float | None:
        """The trial's logged score by the sweep's metric; None if missing or not finite."""
        value = trial.scores.get(self.sweep.metric.removeprefix("-"))
        return value if trial.state == "done" and value is not None and math.isfinite(value) else None

    def ranked(self) -> list[SweepTrial]:
        """Trials, best first; those without a score last."""
        sign = -1 if not self.sweep.metric.startswith("-") else 1

        def place(trial: SweepTrial) -> tuple[bool, float]:
            value = self.metric(trial)
            return value is None, sign * (value or 0.0)

        return sorted(self.trials, key=place)

    def check_metric(self, trial: SweepTrial) -> None:
        """Check that a finished trial has the sweep's metric. Errors: `RunError` if not."""
        name = self.sweep.metric.removeprefix("-")
        if trial.state == "done" and name not in trial.scores:
            there = ", ".join(sorted(k for k in trial.scores if k != "examples")) or "none"
            raise RunError(
                "LS8352",
                f"--metric: {name} is not a metric of the split {self.sweep.split}; expected one of {there}. "
                "Finished trials are kept; run the sweep again with another --metric or --split",
            )

    def write(self) -> None:
        """Write `sweep.json`. Errors: `RunError` if the folder cannot be written."""
        rows = [
            {
                "name": t.name,
                "folder": str(t.run.folder),
                "keys": dict(t.keys),
                "state": t.state,
                "reason": t.reason,
                "metric": self.metric(t),
                "scores": t.scores,
                "begins_with": self.tree.begins.get(t.name)
                if self.tree
                else None,  # a trial, and a number of its steps
            }
            for t in self.trials  # in the order of trial: a search continues from it
        ]
        values = {"metric": self.sweep.metric, "split": self.sweep.split, "trials": rows}
        try:
            self.sweep.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.sweep.folder / FILE, json.dumps(values, indent=1))
        except OSError as error:
            raise RunError(
                "LS8353", f"--out: cannot write to {self.sweep.folder}: {error.strerror}; give another --out"
            ) from error

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and cells of the table, best trial first."""
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial.keys))
        first = self.sweep.metric.removeprefix("-")
        others = dict.fromkeys(k for t in self.trials for k in t.scores if k not in (first, "examples"))
        lasts = [key.rpartition(".")[2] for key in keys]
        short = [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]
        columns = [*short, first, *others, "state"]
        cells = []
        for trial in self.ranked():
            scores = [f"{trial.scores[k]:.4f}" if k in trial.scores else "-" for k in (first, *others)]
            state = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
            key_cells = [sweep_file.format_value(trial.keys[k]) if k in trial.keys else "-" for k in keys]
            cells.append([*key_cells, *scores, state])
        return columns, cells


def planned(sweep: Sweep, keys: Mapping[str, Any], name: str) -> Run:
    """Load a trial's run and make all checks that need no data. Errors: `RunError`."""
    run = sweep.load(keys)
    folder = sweep.folder / name
    hub = run.hub.model_copy(update={"push_to": None})  # do not push every trial: `lockstep push` uploads the best
    entries = {"name": f"{run.name}-{name}", "output": str(folder), "hub": hub}
    run = run.model_copy(update=entries | {"remote_dir": run.remote_dir and f"{run.remote_dir}/{folder.name}"})
    try:
        launcher = start.launcher_of(run.launch)
        if not launcher.submits or importlib.util.find_spec("torch") is not None:  # without torch here, the ranks check
            start.refuse_options(run)
            run = fitted(run)
        else:
            start.plan_of(run, launcher)
    except RunError as caught:
        raise RunError(caught.code, f"trial {name}: {caught.message}") from None
    return run


def _known(sweep: Sweep) -> list[Mapping[str, Any]]:
    """Return the trials of an interrupted search, after checking that all values it may propose are valid. Errors:
    `RunError`."""
    sweep_file.check()
    for keys in sweep_file.corners(sweep.over):
        planned(sweep, keys, name_of(keys, set()))
    path = sweep.folder / FILE
    if not path.exists():
        return []
    try:
        listed = [row["keys"] for row in json.loads(path.read_text(encoding="utf-8"))["trials"]]
    except (ValueError, KeyError, TypeError):
        raise RunError("LS8354", f"{path} was not written by a sweep; remove it, or give another --out") from None
    if any(keys.keys() != sweep.over.keys() for keys in listed):
        raise RunError("LS8355", f"{path} belongs to a sweep over other keys; give another --out")
    for keys in listed:
        if (other := sweep_file.outside(sweep.over, keys)) is not None:
            raise RunError(
                "LS8531",
                f"{path} has a trial with {other}, which this search cannot propose; search at least the same "
                "values and ranges, or give another --out",
            )
    return listed


def prepare_trials(sweep: Sweep) -> int:
    """Write the run file of every trial without starting any, for a job array or manual starts."""
    if sweep.search is not None:
        raise RunError(
            "LS8356", "--prepare: not supported for a search, whose trials are not known in advance; remove it"
        )
    console = Console(True)
    board = Leaderboard(sweep, console)
    absent: dict[str, str] = {}  # fault -> first trial with it: the data may be on another machine
    for trial in board.trials:
        write_run_yaml(trial.run)
        console.say(f"lockstep train {trial.run.folder}/run.yaml", whole=True)
        try:
            files_of(trial.run.data)
        except RunError as caught:
            absent.setdefault(str(caught), trial.name)
    for fault, name in absent.items():
        console.note(f"trial {name} cannot be started from here: {fault}")
    board.write()
    return 0


def sweep(request: Sweep) -> int:
    """Run the unfinished trials, then print the table and write the comparison. Returns 0, 1 if a trial failed, 75 if
    the sweep was stopped. Errors: `RunError`, if possible before anything starts."""
    if start.joining():
        raise RunError("LS8357", "sweep starts the processes of each trial itself; run it outside of torchrun and srun")
    console = Console(True)
    board = Leaderboard(request, console)
    for trial in board.trials:
        board.check_metric(trial)
    count = request.search.trials if request.search is not None else len(board.trials)
    there = sum(trial.state == "done" for trial in board.trials)
    already = f", {there} of them finished already" if there else ""
    how = "one at a time" if request.parallel == 1 else f"{request.parallel} in parallel"
    goal = f"{'lowest' if request.metric.startswith('-') else 'highest'} {request.metric.removeprefix('-')}"
    console.say(f"{quantity(count, 'trial')}{already}, {how}; best: {goal}; logs: {request.folder}/TRIAL/train.out")
    board.share()
    board.write()
    if start.launcher_of(request.base.launch).submits_arrays and request.search is None:
        stopped = _array(board)
    else:
        try:
            stopped = _run_all(board, count)
        finally:
            board.write()
    console.table(f"{request.base.name}: {request.split}, best first", *board.table(), key="trials")
    folders = [t.run.folder for t in board.ranked() if (t.run.folder / "metrics.jsonl").exists()]
    if folders:
        console.facts({"comparison": str(write_comparison(folders, request.folder / "comparison.html"))})
    if folders and (value := board.metric(best := board.ranked()[0])) is not None:
        of_best = f"{best.run.folder}/export ({request.metric.removeprefix('-')} {value:.4g})"
        console.facts({"best": of_best}, cut={"best"})
    if endless := [t.name for t in board.trials if t.state == "done" and board.metric(t) is None]:
        console.say(f"{request.metric.removeprefix('-')} is not a finite number in {', '.join(endless)}")
    if stopped or any(trial.state == "stopped" for trial in board.trials):
        console.say("stopped; run the same command to continue")
        return STOPPED
    return int(bool(endless) or any(trial.state == "failed" for trial in board.trials))


def _array(board: Leaderboard) -> bool:
    """Submit unfinished trials as one array job, without waiting for it. Errors: `RunError`."""

    request = board.sweep
    check([key for trial in board.trials for key in trial.keys])
    for trial in board.trials:
        if trial.state != "done" and (word := live(trial.run.folder)) is not None:
            trial.state = word
    waiting = [trial for trial in board.trials if trial.state in ("begun", "to do")]
    for trial in waiting:
        write_run_yaml(trial.run)
    if waiting:
        at_most = request.parallel if request.parallel > 1 else None
        job = submit(request.base, [trial.run for trial in waiting], request.folder, at_most)
        for trial in waiting:
            trial.state = "submitted"
        board.console.say(
            f"array job {job} is queued: {quantity(len(waiting), 'trial')}. The same command, later, collects them"
        )
    board.write()
    return False


def _run_all(board: Leaderboard, count: int) -> bool:
    """Run the remaining trials. Returns whether the sweep was stopped before all of them ended."""
    running: dict[int, tuple[SweepTrial, Child, float]] = {}
    ended = sum(trial.state == "done" for trial in board.trials)
    with asked_to_stop() as stop_event:
        try:
            while True:
                while not stop_event.is_set() and (slot := board.slots.free(running)) is not None:
                    if (trial := board.next()) is None:
                        break
                    running[slot] = (trial, _start(board, trial, slot), time.monotonic())
                if stop_event.is_set():
                    for _, child, _ in running.values():
                        child.stop()
                if not running:
                    return stop_event.is_set()
                time.sleep(0.1)
                for slot, (trial, child, since) in list(running.items()):
                    if child.status is not None:
                        del running[slot]
                        ended += 1
                        _ended(board, trial, child, time.monotonic() - since, f"[{ended} of {count}]")
        except BaseException:
            for _, child, _ in running.values():
                child.kill()
            raise


def _start(board: Leaderboard, trial: SweepTrial, slot: int) -> Child:
    """Start a trial. Its folder already has its run file, so it can be resumed even if this process dies."""
    goes_on = " continues" if trial.state == "begun" else board.begin(trial)
    write_run_yaml(trial.run)
    trial.state = "running"
    board.write()
    ACTIVITY.set(f"training {trial.name}")
    if goes_on or board.console.width is None:  # a terminal shows the activity
        board.console.say(f"trial {trial.name}{goes_on} -> {trial.run.folder}/train.out")
    words = ["train", str(trial.run.folder / "run.yaml")]
    return Child("lockstep.cli.main", words, trial.run.folder, "train", board.slots.variables(slot))


def _ended(board: Leaderboard, trial: SweepTrial, child: Child, seconds: float, place: str) -> None:
    """Record the result of a trial. Errors: `RunError` if it lacks the metric that sorts the sweep."""
    child.wait()
    trial.seconds += seconds
    status, trial.state = child.status, "failed"
    if status == 0:
        trial.state = "submitted"
        trial.look(board.sweep.split)
    elif status == STOPPED:
        trial.state = "stopped"
    else:
        trial.reason = child.reason()
    board.write()
    name, value = board.sweep.metric.removeprefix("-"), board.metric(trial)
    outcome = trial.state if value is None else f"{name} {value:.4f}"
    why = f": {trial.reason}" if trial.reason else ""
    board.console.say(f"{place} {trial.name}: {outcome}{why} ({clock(seconds)})")
    board.check_metric(trial)


class Slots:
    """Slots for parallel trials, numbered from 0."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._devices = visible(sweep.base.launch) if sweep.parallel > 1 else []

    def free(self, taken: Container[int]) -> int | None:
        """Return a free slot, or None."""
        return next((i for i in range(self._sweep.parallel) if i not in taken), None)

    def keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Extra keys for a trial: with parallel trials and `launch.processes` left open, its share of the processes.
        Errors: `RunError` if there are too few GPUs."""
        if self._sweep.parallel == 1:
            return {}
        run = self._sweep.load(keys)
        if not start.launcher_of(run.launch).starts_all_ranks:
            return {}
        if run.launch.processes == "auto":
            return {"launch.processes": max(1, processes_of(run) // self._sweep.parallel)}
        if self._devices and self._each < int(run.launch.processes):
            raise RunError(
                "LS8358",
                f"--parallel: {self._sweep.parallel} trials of {quantity(run.launch.processes, 'process')} need "
                f"one GPU per "
                f"process, and there are {len(self._devices)} GPUs; lower --parallel, or set launch.device=cpu",
            )
        return {}

    def variables(self, slot: int) -> dict[str, str]:
        """Environment of the trial in a slot: its GPUs."""
        if not self._devices:
            return {}
        mine = self._devices[slot * self._each : (slot + 1) * self._each]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}

    @property
    def _each(self) -> int:
        """GPUs per slot."""
        return len(self._devices) // self._sweep.parallel


def visible(launch: LaunchSection) -> list[str]:
    """GPUs available to this process, as in CUDA_VISIBLE_DEVICES; none with `launch.device: cpu`."""
    if launch.device == "cpu":
        return []
    try:
        import torch
    except ImportError:  # a machine that only submits jobs
        return []
    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[:count] if visible else [str(i) for i in range(count)]


def check(keys: Sequence[str]) -> None:
    """Check that a key may differ between tasks of an array. Errors: `RunError` if not."""
    if common := [key for key in keys if key.startswith("launch.")]:
        raise RunError(
            "LS8359", f"{common[0]}: cannot be varied, because all trials of an array job share one launch section"
        )


def live(folder: Path) -> str | None:
    """State of a trial's task, if SLURM still has it. Errors: `RunError` if SLURM does not answer."""
    record = job_record.read(folder)
    if record is None or not plugins.fact("launchers", record.launcher, "submits_arrays", False):
        return None
    state = slurm.state_of(record)
    return state.word if state.live else None


def submit(run: Run, runs: Sequence[Run], folder: Path, at_most: int | None) -> str:
    """Submit `runs`, whose run files are in their folders, with the resources of `run.launch`. Returns the job's id.
    Errors: `RunError`; then nothing is queued."""
    plan = slurm.array_plan(run, [each.folder / "run.yaml" for each in runs], folder, at_most)
    job = slurm.submit(plan)
    for task, each in enumerate(runs):
        job_record.write(each.folder, job_record.here("slurm", plan.processes, f"{job}_{task}"))
    return job


WORTH = 0.05  # smallest share of a trial's steps worth sharing: all warm-ups from 0 have their first step in common


@dataclass(frozen=True)
class Tree:
    """Trials by name, with their common first steps."""

    begins: dict[str, tuple[str, int]] = field(default_factory=dict)  # trial -> an earlier one, shared steps
    courses: dict[str, Course] = field(default_factory=dict)  # of trials that differ only in per-step keys

    def left_at(self, name: str) -> list[int]:
        """Steps of a trial after which others branch off."""
        return sorted({step for other, step in self.begins.values() if other == name})

    @property
    def summary(self) -> str:
        """Say how many steps are saved; empty if none."""
        if not self.begins:
            return ""
        alone = sum(len(each.rates) for each in self.courses.values())
        together = alone - sum(step for _, step in self.begins.values())
        return (
            f"{quantity(len(self.begins), 'trial')} from the first steps of another one: {together:,} steps "
            f"instead of {alone:,}"
        )

    def begin(self, name: str, runs: Mapping[str, Run]) -> str:
        """Copy the checkpoint from which a trial starts. Returns a text for the user. Errors: `RunError` if the other
        trial left none; the trial then starts from the beginning."""
        from lockstep.lab.branch import place, take

        other, step = self.begins[name]
        job = Job.of(runs[name])
        begun = take(runs[other].folder, step, job, self.courses[name])
        place(begun, job, self.courses[name])
        return f"begins with step {begun.step} of {other}"


def shared_steps(runs: Mapping[str, Run]) -> Tree:
    """Find the common steps of trials. Prepares the data of trials that may share any; errors in the data are left to
    the trial that uses them."""
    tree = Tree()
    for names in _alike(runs):
        try:
            job = Job.of(runs[names[0]]).with_data()
            task: Any = job.task
            for name in names:
                tree.courses[name] = course(replace(job, run=task(runs[name]).fit_defaults()[0]))
        except (RunError, OSError):
            for name in names:
                tree.courses.pop(name, None)
            continue
        for place, name in enumerate(names):
            shared = [(parting(tree.courses[other], tree.courses[name])[0], other) for other in names[:place]]
            most = max((steps for steps, _ in shared), default=0)
            if most >= WORTH * len(tree.courses[name].rates):
                tree.begins[name] = next(other for steps, other in shared if steps == most), most
    return tree


def _alike(runs: Mapping[str, Run]) -> list[Sequence[str]]:
    """Names of trials that differ only in per-step keys, in groups of two or more."""
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        values = arithmetic_of(run)
        fixed = {k: v for k, v in values.items() if k not in OF_STEPS} | {"": _read(values.get("data.sources"))}
        key = json.dumps(fixed, sort_keys=True)
        groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1 and not _refused(runs, names)]


def _read(sources: Any) -> Any:
    """Sources of a mixture, without their proportions."""
    return [{k: v for k, v in each.items() if k != "weight"} for each in sources or ()]


def _refused(runs: Mapping[str, Run], names: Sequence[str]) -> bool:
    jobs = [Job.of(runs[name]) for name in names]
    first = jobs[0].arithmetic()
    return any(
        shares_nothing(job, {k: v for k, v in job.arithmetic().items() if first.get(k) != v}) is not None
        for job in jobs
    )
