"""Questions of `lockstep init`, and defaults for everything else: model, lengths, sizes, rates.

In: the data, the task and the machine. Out: the keys of a run file as nested mappings, in the order of the file. Steps
and intervals are filled in by `with_steps`, once the number of training examples is known. Each question has a default
(an empty answer) and a check, and is repeated until the answer is valid. Without a terminal the default is used, and a
note says so.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data.order import Order, total_steps
from lockstep.data.source import BUILTIN
from lockstep.lab import machine_info
from lockstep.lab.init.columns import DatasetProfile, task_named
from lockstep.track.console import Console
from lockstep_trace.coded import quantity

SCRATCH = "scratch"  # the answer for a small model, trained from scratch
# Chat template for tokenizers without one.
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_T5 = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # languages of its pretrained prompts
_SMALL_GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 128}
_SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
_SMALL_MARIAN = {"d_model": 128}
_SMALL_MARIAN |= {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 512}.items()
}
SCALED = {"scale_embedding": True}  # of models that add sinusoidal positions: see `config_checks.UNSCALED`
STEPS_TO_WRITE = 600  # least steps of a small model from scratch that writes texts: in fewer it ignores its source
MOST_EPOCHS = 20
_SMALL_OTHERS = {
    "num_key_value_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 512,
    "d_kv": 32,
}  # names in T5's config, and others'
_SMALL_OTHERS |= {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 512}  # names in DistilBERT's config


@dataclass(frozen=True)
class MachineInfo:
    """Properties of this machine that affect a run file."""

    cores: int
    gpus: int
    bf16: bool  # whether its GPUs support bf16
    hub: bool  # whether the Hub is reachable

    @staticmethod
    def look() -> MachineInfo:
        """Probe this machine in limited time; what a probe cannot find counts as missing."""
        facts = machine_info.bounded(lambda: machine_info.gpu_facts(60), 65)
        reached = machine_info.bounded(machine_info.network, 8)
        online = bool(reached.get("hub_reachable")) and reached.get("offline") in (None, "", "0")
        cores = int(machine_info.machine()["cores"])
        return MachineInfo(cores, len(facts.get("devices", ())), bool(facts.get("bf16")), online)

    @property
    def processes(self) -> int:
        return self.gpus or self.cores

    def described(self) -> str:
        return quantity(self.gpus, "GPU") if self.gpus else f"{quantity(self.cores, 'core')}, no GPU"


def model_for(task: str, look: DatasetProfile, here: MachineInfo) -> str:
    """Return the task's pretrained model if the Hub is reachable, else a small one from scratch."""
    default = task_named(task).default_model
    return default or SCRATCH if here.hub and look.source != BUILTIN else SCRATCH


def values(
    path: Path, data: DataSection, task: dict[str, Any], model: str, look: DatasetProfile, here: MachineInfo
) -> dict[str, Any]:
    """The run file as nested mappings, in the order of the file; steps assume about as many examples as rows."""
    small, length, kind = model == SCRATCH, _length(look, task), task_named(task["name"])
    keys = kind.Options.model_fields
    called = path.stem if path.stem != "run" else Path(look.source).stem or "run"
    filled: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", called).lstrip("._-") or "run"}
    filled["task"] = dict(task)
    filled["data"] = {k: v for k, v in data.model_dump(exclude_unset=True).items() if v is not None}
    if kind.length_key is not None:
        section, _, key = kind.length_key.partition(".")
        filled[section].setdefault(key, length)
    if model.startswith("google-t5/") and kind.t5_prefix:
        languages = {side: _T5.get(str(task[side]), task[side]) for side in kind.language_keys}
        filled["task"] |= {"prefix": kind.t5_prefix.format(**languages)}
    if "stride" in keys:
        filled["task"].setdefault("stride", min(128, length // 4))
    if "bleu" in keys and importlib.util.find_spec("sacrebleu") is None:
        filled["task"].setdefault("bleu", False)
    filled |= scratch(task["name"], length, look.sizes["train"]) if small else {"model": {"source": model}}
    filled |= {"epochs": 3, "batch_size": 1, "micro_batches": 1}
    filled["precision"] = "bf16" if here.gpus and here.bf16 else "fp32"
    rate = 1e-3 if small else kind.usual_rate
    filled["optim"] = {"learning_rate": rate, "schedule": "linear", "warmup_fraction": 0.06}
    filled["strategy"] = {"name": "ddp" if here.processes > 1 else "single"}
    filled["launch"] = {"processes": "auto"}
    return filled


def with_steps(
    filled: dict[str, Any], examples: int, here: MachineInfo, chosen: Collection[str] = ()
) -> dict[str, Any]:
    """Fill in batch sizes, epochs and intervals that occur within the run. `chosen`: keys that the user wrote."""
    batch = filled["batch_size"] if filled["batch_size"] > 1 else _batch(examples)
    in_batch_negatives = task_named(filled["task"]["name"]).in_batch_negatives  # more of them in larger micro-batches
    if in_batch_negatives and filled["batch_size"] == 1:
        batch = max(batch, min(32, examples))
    micro = filled["micro_batches"] if filled["micro_batches"] > 1 else _micro_batches(batch, here)
    if in_batch_negatives and filled["micro_batches"] == 1:
        micro = max(1, min(2 ** math.ceil(math.log2(max(1, here.processes))), batch // 8))
    epoch, total = steps_of(filled | {"batch_size": batch}, examples)
    if _writes_from_scratch(filled) and not {"epochs", "steps", "max_time"} & {*chosen} and total < STEPS_TO_WRITE:
        filled = filled | {"epochs": min(MOST_EPOCHS, math.ceil(STEPS_TO_WRITE / epoch))}
        epoch, total = steps_of(filled | {"batch_size": batch}, examples)
    each = max(1, min(epoch, total // 2))  # the end always has an evaluation and a checkpoint
    evaluate = {"every": "epoch" if epoch < total else each} | filled.get("evaluate", {})
    checkpoint = {"every": min(200, each)} | filled.get("checkpoint", {})
    track = filled.get("track", {}) | ({} if total >= 30 else {"every": max(1, total // 10)})
    more = {"evaluate": evaluate, "checkpoint": checkpoint} | ({"track": track} if track else {})
    return filled | {"batch_size": batch, "micro_batches": micro} | more


def _writes_from_scratch(filled: dict[str, Any]) -> bool:
    """Whether the model starts from random weights and writes one text from another."""
    return "type" in filled.get("model", {}) and task_named(filled["task"]["name"]).small_model == "marian"


def steps_of(filled: dict[str, Any], examples: int) -> tuple[int, int]:
    """Steps per epoch and in total, counted as in training."""
    epoch = Order(examples, filled["batch_size"], 0).steps_per_epoch
    return epoch, total_steps(filled.get("epochs"), filled.get("steps"), epoch)


def scratch(task: str, length: int, rows: int) -> dict[str, dict[str, Any]]:
    """Sections of a small model, with a tokenizer if it reads texts, that trains on a laptop."""
    kind = task_named(task).small_model
    if kind == "vit":
        return {"model": {"type": kind, "config": {**_SMALL_BERT, "image_size": 64, "patch_size": 8}}}
    config = {
        "gpt2": {**_SMALL_GPT2, "n_positions": length},
        "bert": {**_SMALL_BERT, "max_position_embeddings": length},
        "marian": {**_SMALL_MARIAN, **SCALED, "max_position_embeddings": length},
    }.get(kind) or small_config(kind, length)
    return {
        "model": {"type": kind, "config": config},
        "tokenizer": {"train": "bpe", "vocab_size": 8000 if rows > 5000 else 2000},
    }


def small_config(kind: str, length: int) -> dict[str, Any]:
    """Config entries of a small model of a transformers type, for texts of `length` tokens; empty for an unknown
    type."""
    from transformers import CONFIG_MAPPING

    from lockstep.tasks.models.config_checks import UNSCALED  # imports torch

    if kind not in CONFIG_MAPPING:
        return {}
    usual = CONFIG_MAPPING[kind]().to_dict()
    small = _SMALL_GPT2 | _SMALL_BERT | _SMALL_MARIAN | _SMALL_OTHERS
    small |= dict.fromkeys(("n_positions", "max_position_embeddings"), length)
    scaled = SCALED if kind in UNSCALED else {}
    return {name: value for name, value in small.items() if isinstance(usual.get(name), int)} | scaled


def _length(look: DatasetProfile, task: dict[str, Any]) -> int:
    """Length in tokens that covers nearly all texts: about four characters per token, fewer with a small vocabulary."""
    used = [look.characters[value] for value in map(str, task.values()) if value in look.characters]
    tokens = sum(used) / 3 if used else 128
    return next((each for each in (32, 64, 128, 256) if each >= tokens), 256 if not used else 512)


def _batch(examples: int) -> int:
    """Examples per step: a power of two of at least 8, with at least 30 steps per epoch if the data allow."""
    return int(min(64, examples, max(8, 2 ** math.floor(math.log2(max(1, examples / 30))))))


def _micro_batches(batch: int, here: MachineInfo) -> int:
    """Micro-batches per step: a power of two that allows twice the processes, and eight for a large batch; one per
    process for a small batch."""
    goal = max(8, 2 ** (math.ceil(math.log2(max(1, here.processes))) + 1))
    return max(2 ** math.floor(math.log2(min(batch, goal))), min(batch, here.processes))


Ask = Callable[[str, str], str]  # (question, default) -> answer
MOST = 10  # maximum attempts; also ends a non-interactive input

Answer = TypeVar("Answer")


class NoAnswerMends(RunError):
    """An error that a different answer cannot fix; the question is not repeated."""


@dataclass
class Prompter:
    """Asks questions on a terminal, or takes defaults if `ask` is None."""

    ask: Ask | None
    console: Console
    notes: list[str] = field(default_factory=list)  # for the header of the file

    def note(self, text: str) -> None:
        """Note an assumption, and how to change it."""
        if text not in self.notes:
            self.notes.append(text)
            self.console.note(text)

    def answer(self, question: str, default: str, check: Callable[[str], Answer]) -> Answer:
        """Return the result of `check` for the user's answer. An invalid answer (`RunError`) is reported, and the
        question repeated.

        Errors: `RunError` of the default without a terminal, at the end of input, and for the last of `MOST` invalid
        answers."""
        if self.ask is None:
            return check(default)
        for tries in range(MOST):
            try:
                reply = self.ask(question, default)
            except EOFError:
                raise RunError(
                    "LS8300",
                    "standard input ended before all questions were answered; give --data, --task and --model, or "
                    "--yes to accept the guesses",
                ) from None
            try:
                return check(reply)
            except NoAnswerMends:
                raise
            except RunError as error:
                if tries + 1 == MOST:
                    raise
                self.console.say(str(error))
        raise AssertionError

    def sure(self, question: str, default: bool) -> bool:
        """Ask a yes-or-no question."""
        return self.answer(f"{question} (yes/no)", "yes" if default else "no", _yes)


def _yes(text: str) -> bool:
    if text.lower() in ("yes", "y", "no", "n"):
        return text.lower().startswith("y")
    raise RunError("LS8301", f"invalid answer {text!r}; expected yes or no")


def one_of(names: list[str], what: str) -> Callable[[str], str]:
    """Make a check for answers from a list."""

    def check(answer: str) -> str:
        if answer not in names:
            raise RunError("LS8302", f"{answer!r} is not a {what}; expected one of {', '.join(names)}")
        return answer

    return check


def terminal(question: str, default: str) -> str:
    """Ask on the terminal; an empty line means the default. Errors: `EOFError` at the end of input."""
    return input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default


def can_ask() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
