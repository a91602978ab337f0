"""Convert a checkpoint to an export, cached, for `predict`, `evaluate` and `model.source`.

In: OUTPUT/checkpoints/step-N. Out: a folder in the cache that `from_pretrained` loads, created once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.manifest import broken, folder_of, read_manifest
from lockstep.config.run import RunError, load
from lockstep.config.sections import ModelSection, TokenizerSection
from lockstep.data import hub
from lockstep.data.cache import cached
from lockstep.data.job import Job
from lockstep.tasks.task import Calibrates, make_task

if TYPE_CHECKING:
    from lockstep.checkpoint.shard_files import Files


def fetch(model: ModelSection, tokenizer: TokenizerSection) -> list[str]:
    """Ensure that the model exists if `model.source` names a checkpoint, and is undamaged if it names an export;
    likewise for `tokenizer.source`. Returns notes on edited files of an export. Errors: `RunError`."""
    notes = []
    for source in {model.source, tokenizer.source} - {None}:
        output, checkpoint = hub.parts(Path(str(source)).expanduser())
        if checkpoint is not None and (output / "run.yaml").is_file():
            exported_checkpoint(output, checkpoint, model.trust_remote_code)
        else:
            export_hashes.require_whole_source(str(source))
            edited = export_hashes.output_of_source(str(source))
            if edited is not None and (text := export_hashes.note_of_edits(edited)) is not None:
                notes.append(text)
    return notes


def exported_checkpoint(output: Path, checkpoint: Path, trusted: bool = False) -> Path:
    """Return the folder of the checkpoint's model. Prepares its training data if necessary, because they define its
    labels and tokens. `trusted`: custom code that its run file needs may run. Errors: `RunError`."""
    manifest = read_manifest(checkpoint)
    fault = manifest if isinstance(manifest, str) else broken(checkpoint, manifest)
    if not checkpoint.exists():
        there = sorted(path.name for path in folder_of(output).glob("step-*"))
        fault = f"there is no such folder; {output} has {', '.join(there) if there else 'no checkpoint'}"
    if fault is not None or isinstance(manifest, str):
        raise RunError("LS5010", f"{checkpoint} cannot be used: {fault}")
    # otherwise DeepSpeed prints messages
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    run = load(output / "run.yaml", [])
    if run.model.trust_remote_code and not trusted:
        raise RunError(
            "LS5011",
            f"model.trust_remote_code: {output / 'run.yaml'} sets it, but code from a folder runs only if you "
            "set it too: read the code, then add model.trust_remote_code=true",
        )
    fetch(run.model, run.tokenizer)  # that run may itself start from a checkpoint
    job = Job.of(run).with_data()
    prepared = job.data
    if manifest.data != prepared.key:
        raise RunError(
            "LS5012",
            f"{checkpoint} was trained on other data or with another tokenizer than {output / 'run.yaml'} "
            "names now, so its labels and tokens are unknown; restore that data, or name another checkpoint",
        )

    def make(aside: Path) -> None:
        from lockstep.checkpoint.shard_files import Files  # imports torch.distributed.checkpoint

        files = Files(checkpoint, manifest.hashes)
        task = make_task(job)
        if isinstance(task, Calibrates):
            task.calibrate(manifest.scores)
        saved = [name.removeprefix("model.") for name in files.names if name.startswith("model.")]
        # the moving average of a weight, if there is one, as in an export
        of = {name: f"ema.{name}" if f"ema.{name}" in files else f"model.{name}" for name in saved}
        weights = {name: files.whole(each) for name, each in of.items()}
        names = _under_all_names(task.model(empty=True), evaluated(job.rule, files, weights))
        aside.mkdir(parents=True)
        task.write(aside, names)

    return cached(hub.of_checkpoint(checkpoint), make)


def evaluated(rule: Any, files: Files, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights used for evaluation, if the optimizer `rule` keeps an average of the trained ones."""
    state: dict[str, dict[str, Tensor]] = {}
    for whole in (each for each in files.names if rule.averages and each.startswith("optimizer.")):
        _, key, name = whole.split(".", 2)
        state.setdefault(name, {})[key] = files.whole(whole)
    return {n: rule.evaluated(weight, state[n]) if n in state else weight for n, weight in weights.items()}


def _under_all_names(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as in a state dict: tied ones under each of their names. Buffers missing from checkpoints are the model's
    own."""
    places: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(name)
    known = ((names, next((each for each in names if each in weights), None)) for names in places.values())
    return {name: weights[first] for names, first in known if first is not None for name in names}
