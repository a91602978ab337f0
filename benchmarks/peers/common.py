"""What the peer scripts share: arguments, data, model, parameter groups, the meter and the JSON report.
Each peer trains the same classifier on the same jsonl files with the same optimisation, on CPU or on a GPU.
Start a peer with `python PEER.py ...` or `torchrun --nproc_per_node=2 PEER.py ...` (gloo)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process; read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models and tokenizers are local folders

import argparse
import gc
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from checks import Checked, memory_baseline, peak_memory, settled
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
    trainer_pt_utils,
)

BETAS = (0.9, 0.999)
EPS = 1e-8


def world_size() -> int:
    """The number of processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world(reported: int) -> None:
    """Stop if the library's world, or torch's, is not the launcher's (two silent worlds of one, say)."""
    live = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if not reported == live == world_size():
        raise RuntimeError(f"launched {world_size()} processes; the library has {reported}, torch {live}")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line every peer takes; `per_process` is the share of the global batch."""
    parser = argparse.ArgumentParser(description=description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="folder of a pretrained model (and its tokenizer)")
    source.add_argument("--gpt2-config", type=json.loads, help="a GPT-2 configuration as JSON, weights drawn")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder; the model's where left out")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=128, help="global: over all processes")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--epochs", type=int, help="whole ones; the training file then holds a multiple of the batch")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--schedule", choices=["linear", "cosine", "constant_with_warmup"], default="linear")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, help="rank 0 writes its report here")
    parser.add_argument("--skip", type=int, help="leave the first N steps out of the rate; default: 5, 0 of epochs")
    parser.add_argument("--evaluate", action="store_true", help="accuracy on the validation file at the end")
    args = parser.parse_args()
    with args.train.open(encoding="utf-8") as file:
        rows = sum(bool(line.strip()) for line in file)
    args.whole = rows % args.batch_size == 0  # no step is smaller, and nobody pads or repeats a tail
    if args.epochs is not None:
        if not args.whole:
            parser.error(f"--epochs: {rows} training examples are not a multiple of --batch-size {args.batch_size}")
        args.steps = args.epochs * rows // args.batch_size
    args.skip = (0 if args.epochs else 5) if args.skip is None else args.skip
    if not 0 <= args.skip < args.steps:
        parser.error("--skip must be less than --steps")
    if args.gpt2_config is not None and args.tokenizer is None:
        parser.error("--gpt2-config needs --tokenizer")
    if args.batch_size % world_size():
        parser.error("--batch-size must be a multiple of the number of processes")
    args.per_process = args.batch_size // world_size()
    torch.set_num_threads(1)
    args.memory_baseline = memory_baseline(args.device)
    return args


class Examples(Dataset[dict[str, Any]]):
    """Tokenised examples, unpadded, in memory."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        self.labels = [int(row["label"]) for row in rows]
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)
        self.columns: dict[str, list[Any]] = {**encoded, "label": self.labels}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: column[index] for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Examples, Examples]:
    """Seed, then the model (fp32 weights, training mode), its tokenizer, and the two tokenised files."""
    set_seed(args.seed)
    if args.gpt2_config is not None:
        tokenizer = GPT2Tokenizer.from_pretrained(args.tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    train = Examples(args.train, tokenizer, args.max_length)
    validation = Examples(args.validation, tokenizer, args.max_length)
    num_labels = max(train.labels) + 1
    if args.gpt2_config is not None:
        given = {k: value for k, value in args.gpt2_config.items() if k not in ("type", "model_type")}
        settings = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **given}
        config = AutoConfig.for_model("gpt2", num_labels=num_labels, **settings)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=num_labels, dtype=torch.float32
        )
    model.config.use_cache = False  # Trainer does the same: no key-value cache in training
    return model.train(), tokenizer, train, validation  # from_pretrained leaves dropout off


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for all but biases and norms, as Trainer groups them."""
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if id(parameter) in norms or name.endswith("bias") else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def sort_fifty_batches() -> None:
    """transformers' grouping by length sorts 50 batches at once, or a quarter of the data where that is less: on a part
    of the data it then pads more than on the whole. Here it is always 50, in favour of the peers that group."""
    grouped = trainer_pt_utils.get_length_grouped_indices
    trainer_pt_utils.get_length_grouped_indices = partial(grouped, mega_batch_mult=50)


class Meter:
    """Counts what this process feeds the model; `step` is to be called at the end of each optimizer step."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, training: Examples, validation: Examples) -> None:
        self.skip, self.steps, self.done = args.skip, args.steps, 0
        self.examples = self.padded_tokens = self.peak_memory = 0
        self.real_tokens: Any = 0  # on the device: nobody waits for it
        self.device = args.device
        self.first_step = self.wall = self.cpu = 0.0
        self.baseline = args.memory_baseline
        self.checked = Checked(model, args, training, validation)
        model.register_forward_pre_hook(self._feed, with_kwargs=True)

    def _feed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or self.done >= self.steps:
            return
        mask = kwargs["attention_mask"]
        if self.skip == self.done == 0 and not self.wall:  # the first batch of a whole epoch
            self._start()
        self.checked.fed(kwargs["input_ids"], mask)
        if self.skip <= self.done:
            self.examples += mask.shape[0]
            self.padded_tokens += mask.numel()
            self.real_tokens = self.real_tokens + mask.sum()

    def _start(self) -> None:
        settled(self.device)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def step(self) -> None:
        self.done += 1
        self.checked.step()
        if self.done == 1:
            settled(self.device)
            self.first_step = time.time() - psutil.Process().create_time()
        if self.done == self.skip:
            self._start()
        if self.done == self.steps:
            settled(self.device)
            self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
            self.peak_memory = peak_memory(self.device) - self.baseline
            self.real_tokens = int(self.real_tokens)

    def facts(self) -> dict[str, Any]:
        """What `report` gathers of this rank."""
        return {name: value for name, value in vars(self).items() if name != "checked"} | self.checked.facts()


def accuracy(correct: int, seen: int, validation: Examples) -> float:
    """The share that was right; refuses a count in which an example is missing or counted twice."""
    if seen != len(validation):
        raise RuntimeError(f"evaluated {seen} examples of {len(validation)}")
    return correct / seen


def report(
    args: argparse.Namespace, peer: str, package: str, meter: Meter, score: float | None, pads: str = "random"
) -> None:
    """Gather the meters, check them; rank 0 writes one JSON object. Call it when nothing holds the DDP module any more.

    `pads`: `random` (batches as they are drawn) or `grouped` (examples of like length meet): a peer whose padding is
    not what it claims is refused. padding_ratio is tokens fed, padding included, over real tokens: 1.0 is none at all.
    """
    if meter.done != args.steps:
        raise RuntimeError(f"the meter saw {meter.done} steps of {args.steps}")
    ranks: list[Any] = [meter.facts()]
    if world_size() > 1:
        ranks = [None] * world_size()
        dist.all_gather_object(ranks, meter.facts())
        # A DDP module that outlives the group ends it under the interpreter lock, which gloo's threads may be
        # waiting for: the process then never exits (pytorch/pytorch#56297). So DDP goes first.
        gc.collect()
        dist.destroy_process_group()
    padding = sum(r["padded_tokens"] for r in ranks) / sum(r["real_tokens"] for r in ranks)
    loss = meter.checked.verify(ranks, padding, pads)
    examples = sum(rank["examples"] for rank in ranks)
    result = {
        "peer": peer,
        "world": world_size(),
        "precision": args.precision,
        "device": args.device,
        "steps": args.steps,
        "epochs": args.epochs,
        "skip": args.skip,
        "batch_size": args.batch_size,
        "seed": args.seed,
        "examples": examples,
        "examples_per_s": examples / max(rank["wall"] for rank in ranks),
        "cpu_s_per_example": sum(rank["cpu"] for rank in ranks) / examples,
        "time_to_first_step_s": max(rank["first_step"] for rank in ranks),
        "peak_memory_bytes": max(rank["peak_memory"] for rank in ranks),
        "peak_memory_sum_bytes": sum(rank["peak_memory"] for rank in ranks),
        "padding_ratio": padding,
        "tokens_per_example": sum(rank["real_tokens"] for rank in ranks) / examples,
        "loss_before": loss[0],
        "loss_after": loss[1],
        "accuracy": score,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", package)},
    }
    if int(os.environ.get("RANK", "0")) == 0:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
