"""`lockstep init`: a commented run file for a person's own data, after a few questions.

In: a data source, and answers or flags. Out: a run file that loads, plans and trains as it is. What is not asked is
guessed from the data's columns and lengths and from this machine; each key has a comment that says what it is.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.config.sections import DataSection
from lockstep.data.source import BUILTIN
from lockstep.tools.doctor import machine
from lockstep.tools.starter import columns
from lockstep.tools.starter.columns import Look
from lockstep.track.console import Console

SCRATCH = "scratch"  # instead of a model's name: a small one, trained from nothing
# What a task is fine-tuned from, unless a person names another.
PRETRAINED = {
    "classification": "distilbert/distilbert-base-uncased",
    "token_classification": "distilbert/distilbert-base-cased",
    "translation": "google-t5/t5-small",
    "language_modeling": "openai-community/gpt2",
}
_T5 = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # what it was trained to be asked
_SMALL_GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 128}
_SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
_SMALL_MARIAN = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
}
# Where the key's own description leans on a key that is not in the file.
_ABOUT = {
    "task.name": "what is trained; the other keys of this section are the task's",
    "model.config": "entries of the model's config: a small model, to begin with",
    "optim.warmup_fraction": "share of all steps in which the rate rises from 0",
    "strategy.name": "how processes share a step; `lockstep list` says what there is",
}
Ask = Callable[[str, str], str]  # a question and the answer that an empty line stands for


@dataclass(frozen=True)
class Here:
    """What of this machine decides a run file."""

    cores: int
    gpus: int
    bf16: bool  # whether its GPUs compute in it
    hub: bool  # whether the Hub can be reached

    @staticmethod
    def look() -> Here:
        """Bounded in time; what cannot be found is not there."""
        found = machine.bounded(lambda: machine.torch_facts(60), 65)
        reached = machine.bounded(machine.network, 8)
        online = bool(reached.get("hub_reachable")) and reached.get("offline") in (None, "", "0")
        cores = int(machine.machine()["cores"])
        return Here(cores, len(found.get("devices", ())), bool(found.get("bf16")), online)

    @property
    def processes(self) -> int:
        return self.gpus or self.cores

    def described(self) -> str:
        return f"{self.gpus} GPU(s)" if self.gpus else f"{self.cores} core(s), no GPU"


def init(path: Path, flags: dict[str, str | None], overrides: list[str], force: bool, ask: Ask | None) -> int:
    """The whole command. `flags`: data, task and model where given; `ask`: None where nobody can be asked.

    Errors: `RunError`; then nothing was written.
    """
    if path.exists() and not force:
        raise RunError(f"{path} is there already; choose another name, or replace it with --force")
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path}: there is no folder {path.absolute().parent}")
    console, here = Console(True), Here.look()
    given = overrides_of(overrides)
    data = _data(flags.get("data") or given.get("data.source"), given, ask)
    found = columns.look(data)
    console.say(f"{found.source}: {_sizes(found)}; columns {found.described()}")
    task = _task(found, flags.get("task") or given.get("task.name"), given, ask)
    console.say(f"task: {', '.join(f'{key} {value}' for key, value in task.items())}")
    default = PRETRAINED[task["name"]] if here.hub and found.source != BUILTIN else SCRATCH
    asked = flags.get("model") or given.get("model.source") or (SCRATCH if "model.type" in given else None)
    model = asked or (ask(f"Model (Hub id, folder, or {SCRATCH})", default) if ask else default)
    filled = values(path, data, task, model, found, here)
    for key, value in given.items():
        _set(filled, key, value)
    run = checked(path, write(filled, path.name, found, here))
    console.say(f"wrote {path}: {run.task.name} with {run.model.source or run.model.type} on {here.described()}")
    console.say(f"next: lockstep plan {path}; lockstep train {path}")
    return 0


def checked(path: Path, text: str) -> Run:
    """Write the file, if what it says can be loaded and planned. Errors: `RunError`; then nothing was written."""
    from lockstep.launchers.start import launcher_of

    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        run = load(aside, [])
        launcher_of(run).plan(run)
        os.replace(aside, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    except RunError as error:
        raise RunError(str(error).replace(str(aside), str(path))) from None
    finally:
        aside.unlink(missing_ok=True)
    return run


# -- what is asked ---------------------------------------------------------------------------------------------------


def _data(source: str | None, given: dict[str, Any], ask: Ask | None) -> DataSection:
    if source is None and ask is None:
        raise RunError("give the data: --data FOLDER, FILE, HUB-ID or builtin/emotion")
    source = source or (ask(f"Data (a folder, a file, a Hub id, or {BUILTIN})", BUILTIN) if ask else None)
    more = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("data.")}
    return DataSection(**{**more, "source": source})


def _task(found: Look, name: str | None, given: dict[str, Any], ask: Ask | None) -> dict[str, Any]:
    """The `task` section: the guess, or what was asked for, with the columns that fit it."""
    own = {
        key.partition(".")[2]: value for key, value in given.items() if key.startswith("task.") and key != "task.name"
    }
    guessed: dict[str, Any] | None = None
    try:
        guessed = columns.guess(found)
    except RunError:
        if name is None and ask is None:
            raise
    if name is None and ask is not None:
        name = ask(f"Task ({', '.join(columns.TASKS)})", guessed["name"] if guessed else "classification")
    name = name or str((guessed or {})["name"])
    if name not in columns.TASKS:
        raise RunError(f"--task: {name!r} is not one of {', '.join(columns.TASKS)}")
    keys = guessed if guessed and guessed["name"] == name else columns.keys_of(name, found)
    if keys is None and not own and ask is None:
        raise RunError(
            f"--task: {found.source} seems to have no columns for {name}; it has {found.described()}. "
            "Name them: task.text=... task.label=... (see `lockstep schema`)"
        )
    if keys is None:
        wanted = {"classification": ("text", "label"), "token_classification": ("words", "tags")}
        names = wanted.get(name, ("source", "target") if name == "translation" else ("text",))
        keys = {key: ask(f"Column of task.{key}", "") for key in names if key not in own} if ask else {}
    return {"name": name, **{key: value for key, value in keys.items() if key != "name"}, **own}


# -- what follows ----------------------------------------------------------------------------------------------------


def values(path: Path, data: DataSection, task: dict[str, Any], model: str, found: Look, here: Here) -> dict[str, Any]:
    """The run file as nested mappings, in the order in which it is written."""
    size, scratch = found.sizes["train"], model == SCRATCH
    length = _length(found, task)
    batch = _batch(size)
    micro = min(batch, max(8, 2 ** math.ceil(math.log2(max(1, here.processes)))) if batch >= 8 else batch)
    steps = math.ceil(size * (0.9 if "validation" not in found.sizes else 1.0) / batch)  # of an epoch
    lm = task["name"] == "language_modeling"
    called = path.stem if path.stem != "run" else Path(found.source).stem or "run"
    filled: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", called).lstrip("._-") or "run"}
    filled["task"] = task | ({"block_size": length} if lm and "block_size" not in task else {})
    if model.startswith("google-t5/") and task["name"] == "translation":
        source, target = (_T5.get(str(task[side]), task[side]) for side in ("source", "target"))
        filled["task"] |= {"prefix": f"translate {source} to {target}: "}
    filled["data"] = {k: v for k, v in data.model_dump(exclude_unset=True).items() if v is not None}
    if not lm:
        filled["data"].setdefault("max_length", length)
    filled["model"] = _scratch(task["name"], length) if scratch else {"source": model}
    if scratch:
        filled["tokenizer"] = {"train": "bpe", "vocab_size": 8000 if size > 5000 else 2000}
    filled |= {"epochs": 3, "batch_size": batch, "micro_batches": micro}
    filled["precision"] = "bf16" if here.gpus and here.bf16 else "fp32"
    rate = 1e-3 if scratch else {"classification": 3e-5, "token_classification": 3e-5}.get(task["name"], 5e-5)
    filled["optim"] = {"learning_rate": rate, "schedule": "linear", "warmup_fraction": 0.06}
    filled["strategy"] = {"name": "ddp" if here.processes > 1 else "single"}
    filled["launch"] = {"processes": "auto"}
    filled["evaluate"] = {"every": steps}
    filled["checkpoint"] = {"every": min(200, steps)}
    return filled


def _scratch(task: str, length: int) -> dict[str, Any]:
    """A small model that trains on a laptop."""
    if task == "token_classification":
        return {"type": "bert", "config": {**_SMALL_BERT, "max_position_embeddings": length}}
    if task == "translation":
        return {"type": "marian", "config": {**_SMALL_MARIAN, "max_position_embeddings": length}}
    return {"type": "gpt2", "config": {**_SMALL_GPT2, "n_positions": length}}


def _length(found: Look, task: dict[str, Any]) -> int:
    """Tokens that hold nearly every text: some four characters each in words, fewer in small vocabularies."""
    used = [found.characters[value] for value in map(str, task.values()) if value in found.characters]
    tokens = sum(used) / 3 if used else 128
    return next((each for each in (32, 64, 128, 256) if each >= tokens), 256 if not used else 512)


def _batch(size: int) -> int:
    """Examples a step: a power of two with at least 30 steps an epoch where the data allow that."""
    return int(min(64, max(1, 2 ** math.floor(math.log2(max(1, size / 30))))))


def _sizes(found: Look) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in found.sizes.items()) + " examples"


def _set(filled: dict[str, Any], key: str, value: Any) -> None:
    """A key that was given, instead of what was guessed."""
    *sections, last = key.split(".")
    for section in sections:
        filled = filled.setdefault(section, {})
    if last in ("steps", "epochs"):
        filled.pop("epochs", None)
    filled[last] = value


# -- the file --------------------------------------------------------------------------------------------------------


def write(filled: dict[str, Any], name: str, found: Look, here: Here) -> str:
    """The text of the run file: a header with its arithmetic, then each key with what it is."""
    size, batch, micro = found.sizes["train"], filled["batch_size"], filled["micro_batches"]
    lines = [
        f"# {found.source}: {_sizes(found)}. Written by `lockstep init`.",
        f"# Columns: {found.described()}.",
        "#",
        f"#   lockstep plan {name}      # what would be started",
        f"#   lockstep train {name}     # run it, or go on with it",
        f"#   lockstep train {name} epochs=1 data.limit=200     # a short try",
        "#",
        f"# Arithmetic: {size:,} examples / {batch} a step = {math.ceil(size / batch):,} steps an epoch; a step is cut "
        f"into {micro} micro-batches.",
        f"# Written for {here.described()}; any number of processes up to {micro} gives the same weights.",
        "# All keys: `lockstep schema`.",
    ]
    rows: list[tuple[str, str]] = []
    options = plugins.find("tasks", filled["task"]["name"]).Options  # type: ignore[attr-defined]
    for key, value in filled.items():
        fields = Run.model_fields
        if not isinstance(value, dict):
            rows.append((f"{key}: {_scalar(value)}", fields[key].description or ""))
            continue
        rows.append((f"{key}:", ""))
        section: Any = fields[key].annotation
        known = dict(section.model_fields) | (dict(options.model_fields) if key == "task" else {})
        for inner, each in value.items():
            about = known[inner].description if inner in known else ""
            about = _ABOUT.get(f"{key}.{inner}", about)
            now = f"; here {min(micro, here.processes)}" if (key, inner) == ("launch", "processes") else ""
            rows.append((f"  {inner}: {_scalar(each)}", f"{about}{now}"))
    width = min(44, max(len(left) for left, _ in rows))
    lines += [f"{left:<{width}}  # {about}" if about else left for left, about in rows]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True))
        .removesuffix("...\n")
        .strip()
    )


def terminal(question: str, default: str) -> str:
    """Ask a person on the terminal; an empty line takes the default. Errors: `RunError` when the answers end."""
    try:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
    except EOFError:
        raise RunError("the answers ended; give --data, --task and --model, or --yes for what is guessed") from None
    return answer or default


def can_ask() -> bool:
    """Whether a person sits at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
