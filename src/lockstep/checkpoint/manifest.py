"""Manifest of a checkpoint: step, code, data, scores, and the run-file keys that determine the weights.

In: a run and its training state. Out: manifest.json, which a resume reads and compares; the best evaluation, as a pure
function of the scores; or a `RunError` that names the differences.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import export_hashes
from lockstep.config import user_code
from lockstep.config.error_messages import value_text
from lockstep.config.errors import reason_of
from lockstep.config.run import Run, RunError
from lockstep.config.sections import CheckpointSection, OptimSection, StrategySection, TaskSection
from lockstep.data.job import Job
from lockstep.distributed.hardware import INSTRUCTIONS, instructions
from lockstep.track import history

if TYPE_CHECKING:
    from lockstep.distributed.world import World


@dataclass(frozen=True)
class Progress:
    """Best evaluation so far, for early stopping; stored in manifests."""

    metric: str = ""  # `checkpoint.best`, the metric of these values
    best: float | None = None  # highest score; higher is better
    step: int = 0  # step of the best score
    since: int = 0  # evaluations since then

    @classmethod
    def of(cls, metric: str | None, saved: Mapping[str, Any]) -> Progress:
        """Read the progress from a manifest; empty if it was counted with another metric than
        `checkpoint.best`."""
        progress = cls(**saved)
        return progress if progress.metric == (metric or "") else cls(metric or "")

    def after(self, step: int, score: float | None, delta: float = 0.0) -> Progress:
        """Progress after one more evaluation. A score counts as better only if it exceeds the best by more than
        `delta`; a score that is not finite never does."""
        if score is not None and (self.best is None or score > self.best + delta):
            return Progress(self.metric, score, step)
        return Progress(self.metric, self.best, self.step, self.since + 1)

    def over(self, patience: int | None) -> bool:
        """Whether early stopping ends training: no improvement in `evaluate.patience` evaluations."""
        return patience is not None and self.since >= patience

    def dump(self) -> dict[str, Any]:
        """Progress as a JSON object; empty before the first evaluation."""
        return asdict(self) if self.best is not None or self.since else {}


@dataclass(frozen=True)
class Candidate:
    """An evaluated checkpoint."""

    score: float  # higher is better
    step: int


def score_of(metric: str | None, scores: Mapping[str, float]) -> float | None:
    """Score by `checkpoint.best`, negated for a metric with a minus sign so that higher is better. None if the metric
    is missing or not finite."""
    metric = metric or ""
    score = scores.get(metric.removeprefix("-"))
    if score is None or not math.isfinite(score):
        return None
    return -score if metric.startswith("-") else score


def unknown_metric(best: str, known: Iterable[str]) -> RunError:
    """The error for a `checkpoint.best` that is no metric of the task."""
    return RunError(
        "LS6002",
        f"checkpoint.best: {best!r} is not a metric of this task; expected one of {', '.join(sorted(known))} "
        "(with a minus if lower is better)",
    )


def best_first(metric: str | None, evaluated: Mapping[int, Mapping[str, float]]) -> list[Candidate]:
    """Sort evaluated steps by score, best first; ties go to the earliest step."""
    candidates = [
        Candidate(score, step) for step, scores in evaluated.items() if (score := score_of(metric, scores)) is not None
    ]
    return sorted(candidates, key=lambda each: (-each.score, each.step))


FORMAT = 2
FILE = "manifest.json"
# Keys that locate the data. Only the tokens themselves matter, and the manifest has their hash.
_READ_FROM = {
    *(
        f"data.{key}"
        for key in (
            "source",
            "config",
            "revision",
            "train",
            "validation",
            "test",
            "encoding",
            "separator",
            "quote",
            "types",
            "drop_missing",
            "drop_unusable",
        )
    ),
    "tokenizer.source",
}


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint."""

    step: int  # updates done
    steps: int  # updates of the whole run
    arithmetic: dict[str, Any]  # run-file keys that determine the weights
    data: str  # hash of the tokenized data
    strategy: str
    world_size: int
    bits: bool  # whether the saving strategy is bitwise equal to a single process
    device: str  # device type
    threads: int  # per process
    versions: dict[str, str]
    scores: dict[str, float]  # evaluation after this step, if any
    trackers: dict[str, str] = field(default_factory=dict)  # tracker -> run id
    hashes: dict[str, str] = field(default_factory=dict)  # file -> SHA-256
    format: int = FORMAT
    hosts: list[str] = field(default_factory=list)  # of each rank
    launch: str = ""  # how the ranks were started
    meter: dict[str, Any] = field(default_factory=dict)  # `Meter` state for the next log line
    code: dict[str, str] = field(default_factory=dict)  # hashes of the user's files that determine the weights
    progress: dict[str, Any] = field(default_factory=dict)  # evaluations so far: `Progress`
    every: int = 0  # steps between checkpoints, if the run averages checkpoints (average.last)
    pending: list[str] = field(default_factory=list)  # work that is due after this step: train_state.py

    def dump(self) -> bytes:
        """The manifest as JSON; the last entry is the hash of all others."""
        values = asdict(self)
        seal = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return json.dumps(values | {"sha256": seal}, indent=1).encode()

    @property
    def train_state(self) -> dict[str, Any]:
        """The non-tensor training state, in the form that `TrainState.load_state_dict` takes."""
        meter = {key: value for key, value in self.meter.items() if key != _OWED}
        pending = [*self.pending, *(["evaluation"] if self.meter.get(_OWED) else [])]
        return {"step": self.step, "meter": meter, "progress": self.progress, "pending": pending}


_OWED = "owed"  # key in the meter of manifests that were written before `pending` existed


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def folder_of(output: Path) -> Path:
    return output / "checkpoints"


def read_manifest(folder: Path) -> Manifest | str:
    """Read the manifest of a checkpoint folder, or return a description of its fault."""
    try:
        content = (folder / FILE).read_bytes()
    except OSError as error:
        return f"{FILE}: {reason_of(error)}"
    return parsed(content, folder.name)


def parsed(content: bytes, name: str) -> Manifest | str:
    """Parse the manifest of checkpoint `name`, or return a description of its fault."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return f"{FILE} is not JSON"
    if not isinstance(values, dict) or "format" not in values:
        return f"{FILE} is not the manifest of a checkpoint"
    if values["format"] != FORMAT:
        return f"{FILE} is of format {values['format']!r}, this version reads {FORMAT}"
    values.pop("sha256", None)
    try:
        manifest = Manifest(**values)
    except TypeError:
        return f"{FILE} is not the manifest of a checkpoint"
    if manifest.dump() != content:
        return f"{FILE} does not match its own hash"
    if name_of(manifest.step) != name:
        return f"{FILE} is that of step {manifest.step}"
    return manifest


def add_scores(folder: Path, scores: Mapping[str, float], state: Mapping[str, Any]) -> None:
    """Replace the scores and training state in a checkpoint's manifest, atomically. Errors: `OSError`; the manifest is
    then unchanged."""
    from lockstep.checkpoint.shard_files import write

    if isinstance(manifest := read_manifest(folder), Manifest):
        plain = {name: float(value) for name, value in scores.items()}
        changed = {name: state[name] for name in ("meter", "progress", "pending")}
        write(aside := folder / f".{FILE}.partial", [replace(manifest, scores=plain, **changed).dump()])
        os.replace(aside, folder / FILE)


def candidates(output: Path) -> Iterator[tuple[Path, Manifest | str]]:
    """Iterate over all checkpoints, newest first, with the manifest or a description of its fault. Does not read their
    files and skips folders not named as checkpoints. A folder that cannot be listed is yielded itself, with the reason.
    """
    folder = folder_of(output)
    try:
        names = [entry.name for entry in os.scandir(folder) if re.fullmatch(r"step-\d{6,}", entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_symlink():
            yield folder, f"it is a link to {folder.readlink()}, which is not a folder"
        return
    except OSError as error:
        yield folder, reason_of(error)
        return
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        yield folder / name, read_manifest(folder / name)


def newest_first(output: Path) -> Iterator[tuple[Path, Manifest]]:
    """Iterate over checkpoints with a readable manifest, newest first."""
    for path, manifest in candidates(output):
        if isinstance(manifest, Manifest):
            yield path, manifest


def misfit(path: Path, manifest: Manifest) -> str | None:
    """Describe files that the manifest names and the folder lacks, or return None. Ignores extra files, such as those
    of file browsers and network disks (.DS_Store, ._shard-..., .nfs0001)."""
    try:
        there = {entry.name for entry in path.iterdir()}
    except OSError as error:
        return reason_of(error)
    if not manifest.hashes:
        return f"{FILE} names no file"
    missing = sorted(manifest.hashes.keys() - there)
    return f"{missing[0]} is missing" if missing else None


def averaged(last: int | None, step: int, every: int) -> list[int]:
    """Steps, ascending, of the checkpoints that `average.last` averages when training ended after `step`: it and
    the scheduled checkpoints before it. Checkpoints written at stops do not count."""
    steps = range(max(every, 1), step, max(every, 1)) if every else range(0)
    return [*steps[max(0, len(steps) + 1 - (last or 1)) :], step]


def superfluous(
    output: Path, section: CheckpointSection, average: int | None, newest: Path | None = None
) -> list[Path]:
    """Checkpoints not in `to_keep`, newest first; of equally good ones the earliest is kept."""
    checkpoints = list(newest_first(output))
    needed = to_keep(section, average, {manifest.step: manifest for _, manifest in checkpoints})
    return [path for path, manifest in checkpoints if manifest.step not in needed and path != newest]


def to_keep(section: CheckpointSection, average: int | None, manifests: Mapping[int, Manifest]) -> set[int]:
    """Steps whose checkpoints are kept: the `keep` newest, those of `checkpoint.at`, the best (also the best up to each
    of these), and those that the final average (`average.last`) needs."""
    marked = manifests.keys() & set(section.at)
    best = [
        best_first(section.best, {step: manifest.scores for step, manifest in manifests.items() if step <= last})[:1]
        for last in (*marked, max(manifests, default=0))
    ]
    steps = {
        *sorted(manifests, reverse=True)[: section.keep],
        *marked,
        *(each.step for one in best for each in one),
    }
    if average is not None and manifests:
        steps |= manifests.keys() & averaged(average, max(manifests), manifests[max(manifests)].every)
    return steps


def newest_whole(output: Path) -> int | None:
    """Step of the newest checkpoint whose manifest and files exist; file contents are not read. None if there is
    none."""
    return next((manifest.step for path, manifest in newest_first(output) if misfit(path, manifest) is None), None)


def mismatch(path: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Describe the first of these files whose contents do not match the manifest's hash, or return None."""
    for name in names:
        try:
            digest = export_hashes.sha256_of(path / name)
        except OSError as error:
            return f"{name}: {reason_of(error)}"
        if digest != manifest.hashes[name]:
            return f"{name} does not match its hash"
    return None


def broken(path: Path, manifest: Manifest) -> str | None:
    """Describe the fault of a checkpoint's files, or return None. Reads all of them."""
    return misfit(path, manifest) or mismatch(path, manifest, sorted(manifest.hashes))


def changed(job: Job, manifest: Manifest, mirror: str = "") -> str | None:
    """Explain why a run cannot resume from an intact checkpoint, or return None. `mirror`: where the checkpoint is, if
    not in OUTPUT."""
    run, where, other = job.run, mirror or job.run.folder, "another mirror" if mirror else "another output=FOLDER"
    differing = differing_keys(job, manifest)
    rows = "\n".join(
        f"  {k}: {value_text(then)} in the checkpoint, {value_text(now)} now" for k, (then, now) in differing.items()
    )
    if not differing.keys() <= _READ_FROM:
        return (
            f"{where} holds a checkpoint (step {manifest.step}) of a run with other settings "
            f"that determine the weights:\n{rows}\n"
            f"Restore the old values, or give {other}, or remove the folder"
        )
    files = changed_code(code_of(run.task, run.optim, run.strategy), manifest)
    if run.checkpoint.changed_code == "refuse" and files:
        return (
            f"{where} holds a checkpoint (step {manifest.step}) that was trained with other versions of "
            f"your code: {', '.join(files)} changed since. Restore them, or give {other}. If the changes do not affect "
            "the weights (how the model is scored, for example), set checkpoint.changed_code=allow"
        )
    if manifest.data != job.data.key:
        return (
            f"{where} holds a checkpoint (step {manifest.step}) that was trained on other data or with another "
            f"tokenizer: the contents have changed since. Restore them, or give {other}" + (f"\n{rows}" if rows else "")
        )
    return None


def differing_keys(job: Job, manifest: Manifest) -> dict[str, tuple[Any, Any]]:
    """Keys that determine the weights and have changed since the checkpoint: key -> (value then, value now). If the
    tokens have the checkpoint's hash, keys that only locate the data are ignored."""
    now = job.arithmetic()
    # a key that only one of the two has, such as a strategy's option, counts with its default
    then = {key: job.default(key) for key in now if key not in manifest.arithmetic} | manifest.arithmetic
    if job.run.model.compile == "auto":  # resolved later, to the value in the checkpoint
        then.pop("model.compile", None)
    if job.run.model.fixed_lengths is None:  # as well
        then.pop("model.compile_lengths", None)
    keys = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
    if manifest.data == job.data.key:
        same = {"data.sources"} if _drawn(now) == _drawn(then) else set()
        keys = [key for key in keys if key not in _READ_FROM | same]
    return {key: (then.get(key), now.get(key)) for key in keys}


def _drawn(arithmetic: dict[str, Any]) -> list[Any]:
    """Keys that, besides the sizes of the sources, determine the order in which a mixture's sources are drawn."""
    return [entry.get("weight") for entry in arithmetic.get("data.sources") or ()]


def facts_of(world: World) -> dict[str, Any]:
    """Facts outside the run file that can change bits: device type, threads, versions, instructions on CPUs."""
    import torch
    import transformers

    device = world.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not world.portable:
        if device.type == "cpu":
            versions[INSTRUCTIONS] = instructions()
        return {"device": kind, "threads": world.threads, "versions": versions}
    from lockstep.distributed import portable

    return {"device": kind, "threads": 1, "versions": versions | {"what the processor computes": portable.probe()}}


def code_of(task: TaskSection, optim: OptimSection, strategy: StrategySection) -> dict[str, str]:
    """Hashes of the user's files that determine the weights: file -> hash. As in `Job.arithmetic`, a strategy's files
    are excluded under `strategy.exact`."""
    return user_code.hashes_of(user_code.named(task, optim, None if strategy.exact else strategy).values())


def changed_code(now: Mapping[str, str], manifest: Manifest) -> list[str]:
    """The user's files that have changed since the checkpoint. `now`: their hashes (`code_of`)."""
    then = manifest.code
    return sorted(file for file in now.keys() | then.keys() if now.get(file) != then.get(file))


def differences_of_saving_run(job: Job, world: World, name: str, manifest: Manifest) -> list[str]:
    """Describe differences from the saving run that can change bits: strategy, and those of `facts_of`."""
    run, notes = job.run, []
    if not (manifest.bits and job.same_bits):
        who = run.strategy.name if manifest.bits else manifest.strategy
        did = "continues from it" if manifest.bits else "wrote it"
        notes.append(f"{name}: {who}, which {did}, equals other strategies only to rounding")
    if files := changed_code(code_of(run.task, run.optim, run.strategy), manifest):
        notes.append(f"{name} was written with another version of {', '.join(files)}")
    now = facts_of(world)
    then = {"device": manifest.device, "threads": manifest.threads, **manifest.versions}
    if INSTRUCTIONS in now["versions"]:  # a checkpoint from a GPU has none
        then.setdefault(INSTRUCTIONS, now["versions"][INSTRUCTIONS])
    return notes + [
        f"{key} was {then.get(key)} when the checkpoint was written and is {value} now: results may "
        "differ in the last bits from an uninterrupted run"
        for key, value in {"device": now["device"], "threads": now["threads"], **now["versions"]}.items()
        if then.get(key) != value
    ]


def check_resumable(job: Job) -> Manifest | None:
    """Return the manifest of the newest checkpoint in OUTPUT that the run can resume from, or None. Its files are
    verified later, by the resume. Skips a damaged checkpoint of another run.

    Errors: `RunError`, naming the keys that differ, if keys that determine the weights have changed; `RunError`, naming
    each fault, if checkpoints exist and none can be used.
    """
    unusable = []
    for path, manifest in candidates(job.run.folder):
        reason = manifest if isinstance(manifest, str) else misfit(path, manifest)
        if reason is None and isinstance(manifest, Manifest):
            reason = changed(job, manifest)
            if reason is None:
                return manifest
            if (damage := mismatch(path, manifest, sorted(manifest.hashes))) is None:
                raise RunError("LS6051", reason)
            reason = f"{damage}, and it belongs to another run"
        unusable.append(f"{path.name}: {reason}")
    if unusable:
        raise none_usable(job.run.folder, job.run.remote_dir, unusable)
    return None


def none_usable(folder: Path, mirror: str | None, reasons: Iterable[str]) -> RunError:
    """Error for an output folder whose checkpoints are all unusable: starting over would delete them."""
    rows = "\n".join(f"  {reason}" for reason in reasons)
    also, then = (f" or {mirror}", ", and give another mirror") if mirror else ("", "")
    return RunError(
        "LS6050",
        f"{folder_of(folder)}{also} has checkpoints, but none of them can be used:\n{rows}\nThey were left "
        "unchanged. Make one readable (permissions, a disk that is not mounted, the version of lockstep that "
        f"wrote it), or give another output=FOLDER; to train from the start, move {folder} away{then}",
    )


@dataclass(frozen=True)
class Goal:
    """What a run ends with. It tells a finished run from one that goes on."""

    folder: Path
    best: str | None  # checkpoint.best
    patience: int | None  # evaluate.patience
    export: str  # the exported model, as recorded in `scores.json`: last, best, or the mean of the last checkpoints

    @classmethod
    def of(cls, run: Run) -> Goal:
        export = f"{run.export}" if run.average.last is None else f"mean of {run.average.last}"
        return cls(run.folder, run.checkpoint.best, run.evaluate.patience, export)

    def met_by(self, manifest: Manifest | None) -> bool:
        """Whether the run has done all its steps and its export exists, unchanged, with the requested model. Reads the
        export. `manifest`: of the newest checkpoint."""
        if manifest is None or not self.ended_at(manifest) or self.other_export() is not None:
            return False
        return export_hashes.damage(self.folder) is None

    def ended_at(self, manifest: Manifest) -> bool:
        """Whether training ended at this checkpoint: it is the last step, or early stopping applied."""
        progress = Progress.of(self.best, manifest.progress)
        return manifest.step >= manifest.steps or progress.over(self.patience)

    def other_export(self) -> str | None:
        """The model in the export of a finished run, if the run file now requests another; else None."""
        there = history.scores_of(self.folder).get("export", self.export)
        return None if there == self.export else str(there)
