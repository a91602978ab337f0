"""A file of another system's -> which system's, and what moves it. A Python file is parsed, and never run.

In: a path. Out: `Read`, or a `RunError` that says what can be read. A further system is one more row of `SOURCES` (a
file of keys) or of `SCRIPTS` (a Python file).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.tools.import_config import (
    axolotl,
    command_line,
    engines,
    llama_factory,
    loops,
    sagemaker,
    trainer,
    trainer_script,
    trl,
)
from lockstep.tools.import_config.script import Script
from lockstep.tools.import_config.table import Imported

Move = Callable[[Mapping[str, Any], Imported, int | None], None]
Run = Callable[[Imported, int | None], None]


@dataclass(frozen=True)
class ScriptSource:
    """A system whose files can be read."""

    called: str
    table: frozenset[str]  # its keys
    marks: frozenset[str]  # keys that no other system has: one of them is enough
    move: Move


SOURCES = {
    "accelerate": ScriptSource(
        "accelerate config",
        frozenset(engines.ACCELERATE),
        frozenset({"compute_environment", "distributed_type"}),
        engines.move_accelerate,
    ),
    "deepspeed": ScriptSource(
        "DeepSpeed",
        frozenset(engines.DEEPSPEED),
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
        engines.move_deepspeed,
    ),
    "axolotl": ScriptSource("axolotl", frozenset(axolotl.TABLE), frozenset({"base_model"}), axolotl.move),
    "llama_factory": ScriptSource(
        "LLaMA-Factory",
        frozenset(llama_factory.TABLE),
        frozenset({"finetuning_type", "stage", "cutoff_len", "dataset_dir"}),
        llama_factory.move,
    ),
    "trl": ScriptSource(
        "TRL",
        frozenset(trl.TABLE),
        frozenset({"use_peft", "dataset_train_split", "dataset_test_split"}.union(*trl.MARKS.values())),
        trl.move,
    ),
    "trainer": ScriptSource(
        "TrainingArguments",
        frozenset(trainer.TABLE),
        frozenset({"per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate"}),
        trainer.move,
    ),
}
# Readers of Python files, in the order in which they are asked; None: it is no script of theirs.
SCRIPTS: tuple[Callable[[Script], tuple[str, Run] | None], ...] = (
    sagemaker.read,
    trainer_script.read,
    loops.read,
)


@dataclass(frozen=True)
class Read:
    """What a file is, and what takes it over."""

    called: str
    move: Run  # given `Imported`, and the processes where they were given by hand


def read(path: Path) -> Read:
    """Errors: `RunError`."""
    if path.suffix in (".bin", ".pt", ".pkl"):
        raise RunError(
            f"--from: {path} is pickled, and is not opened. In the script that wrote it: "
            'open("training_args.json", "w").write(args.to_json_string()); then --from training_args.json'
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--from: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".py":
        return script(Script(path, text))
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return Read("a command line", command_line.read(path, text, read, script))
    try:
        keys = json.loads(text) if path.suffix == ".json" else messages.read_yaml(text)
    except json.JSONDecodeError as error:
        raise RunError(f"--from: {path}, line {error.lineno}: {error.msg}") from None
    except yaml.YAMLError as error:
        raise RunError(f"--from: {path} is not valid YAML: {messages.yaml_fault(error)}") from None
    if not isinstance(keys, dict):
        raise RunError(f"--from: {path} must hold a mapping of keys, it holds {messages.kind(keys)}")
    keys = {str(name): value for name, value in keys.items()}
    source = _source_of(path, keys)
    return Read(f"{source.called}, {len(keys)} key(s)", lambda moved, processes: source.move(keys, moved, processes))


def script(of: Script) -> Read:
    """Errors: `RunError` for a script that no reader knows."""
    for reader in SCRIPTS:
        if (known := reader(of)) is not None:
            return Read(*known)
    raise RunError(
        f"--from: {of.path} has no Trainer of transformers, TRL or Lightning, and no training loop that would be "
        "known; a model and a loss of your own: docs/own-module.md"
    )


def _source_of(path: Path, keys: Mapping[str, Any]) -> ScriptSource:
    """The system that has a key of its own among these."""
    for source in SOURCES.values():
        if source.marks & keys.keys():
            return source
    known = ", ".join(source.called for source in SOURCES.values())
    raise RunError(f"--from: {path} has no key by which it would be known as a file of {known}")
