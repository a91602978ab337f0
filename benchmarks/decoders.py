"""Decoders of 20M weights on packed blocks of 256 tokens: lockstep beside a bare loop, Accelerate, Lightning, Trainer.

In: a text file and a folder with the tokenizer of GPT-2; models, precisions, rounds. Out: a Markdown table and, asked
for, every run as JSON. All contenders train the same blocks, cut here once and for all: the text's tokens in its order,
a step of 16 blocks each (so 4,096 tokens), fused AdamW with clipping, dropout as the model's class has it. Each run is
a process of its own with one thread, contenders alternate. A contender whose loss on held-out blocks is further than
5 % from the bare loop's of that round is refused: it has trained something else.
All take their memory from the allocator that LD_PRELOAD names, or from glibc; the record says which.
Example: python benchmarks/decoders.py TEXT TOKENIZER --rounds 3 --out decoders.json
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from checks import memory_baseline, peak_memory
from run import allocator, processor

IMPORTED = (
    "accelerate",
    "lightning",
    "lockstep.training.preload",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
LENGTH, BATCH, STEPS, SKIP, RATE, CLIP = 256, 16, 8, 2, 5e-4, 1.0
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 8, "n_positions": LENGTH},
    "llama": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    },
}


class Meter:
    """Counts steps on one rank; timing starts after `SKIP` of them."""

    def __init__(self) -> None:
        for module in IMPORTED:  # on every side, so that no peak contains only one side's imports
            importlib.import_module(module)
        torch.set_num_threads(1)
        self.done, self.base = 0, memory_baseline("cpu")

    def step(self) -> None:
        self.done += 1
        if self.done == SKIP:
            self.clock, self.processor = time.perf_counter(), time.process_time()
        if self.done == STEPS:
            self.clock, self.processor = time.perf_counter() - self.clock, time.process_time() - self.processor
            self.peak = peak_memory("cpu") - self.base

    def said(self, model: torch.nn.Module, held_out: torch.Tensor) -> dict[str, float]:
        """Format the results of a run."""
        if self.done != STEPS:
            raise SystemExit(f"{self.done} steps were made instead of {STEPS}")
        model.eval()
        with torch.no_grad():
            loss = float(model(input_ids=held_out, labels=held_out).loss)
        tokens = (STEPS - SKIP) * BATCH * LENGTH
        return {
            "tokens_per_s": tokens / self.clock,
            "tokens_per_cpu_s": tokens / self.processor,
            "peak_mib": self.peak / 2**20,
            "loss": loss,
        }


def blocks_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training blocks int64 [STEPS * BATCH, LENGTH], and held-out ones [BATCH, LENGTH]."""
    blocks = torch.load(folder / "blocks.pt")
    return blocks[BATCH:], blocks[:BATCH]


def model_of(name: str, vocabulary: int) -> torch.nn.Module:
    """Build a model with a fixed seed, float32, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    values = {k: v for k, v in MODELS[name].items() if k != "model_type"}
    config = AutoConfig.for_model(MODELS[name]["model_type"], vocab_size=vocabulary, use_cache=False, **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def batches(blocks: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return iter(blocks.split(size))


def bare(name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    """Train with a loop of plain torch, in `pieces` batches per step."""
    train, held_out = blocks_of(folder)
    meter, model = Meter(), model_of(name, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for step in batches(train, BATCH):
        for ids in batches(step, BATCH // pieces):
            with autocast(precision):
                loss = model(input_ids=ids, labels=ids).loss / pieces
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    return meter.said(model, held_out)


def accelerate(name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    from accelerate import Accelerator

    train, held_out = blocks_of(folder)
    meter, model = Meter(), model_of(name, vocabulary)
    kind = Accelerator(
        cpu=True, mixed_precision="bf16" if precision == "bf16" else "no", gradient_accumulation_steps=pieces
    )
    loader = torch.utils.data.DataLoader(list(train), batch_size=BATCH // pieces)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    model, optimizer, loader = kind.prepare(model, optimizer, loader)
    for ids in loader:
        with kind.accumulate(model):
            kind.backward(model(input_ids=ids, labels=ids).loss)
            if kind.sync_gradients:
                kind.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if kind.sync_gradients:
            meter.step()
    return meter.said(kind.unwrap_model(model), held_out)


def lightning(name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    import lightning as L

    train, held_out = blocks_of(folder)
    meter, model = Meter(), model_of(name, vocabulary)

    class Fit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # Trainer(gradient_clip_val=...) refuses a fused optimizer under bf16-mixed, though nothing is scaled
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step > meter.done:
                meter.step()

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        max_epochs=1,
        accumulate_grad_batches=pieces,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Fit(), torch.utils.data.DataLoader(list(train), batch_size=BATCH // pieces))
    return meter.said(model, held_out)


def trainer(name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    train, held_out = blocks_of(folder)
    meter, model = Meter(), model_of(name, vocabulary)

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.step()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(train)

    made = InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=BATCH // pieces,
            gradient_accumulation_steps=pieces,
            num_train_epochs=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            use_cpu=True,
            bf16=precision == "bf16",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in train],
        callbacks=[Steps()],
    )
    made.train()
    return meter.said(model, held_out)


def lockstep(name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    """Train with lockstep's own loop over its own blocks of the same text, which it shuffles."""
    from dataclasses import replace

    from lockstep.checkpoint.checkpoint import Checkpoints
    from lockstep.config.run import load
    from lockstep.distributed.system_metrics import keep_freed_memory
    from lockstep.distributed.world import World
    from lockstep.training.loop import train
    from lockstep.training.resolve import for_rank
    from lockstep.training.session import Sinks, build_session, join_ranks

    meter = Meter()

    class Steps(Sinks):
        def advance(self, step: int) -> None:
            meter.step()

    class Nothing(Checkpoints):
        def save(self, step: int, strategy: object, scores: object = None, state: object = None) -> None: ...

    config = {k: v for k, v in MODELS[name].items() if k != "model_type"}
    values = {
        "task": {"name": "language_modeling"},
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "held.jsonl"), "max_length": LENGTH},
        "model": {"type": MODELS[name]["model_type"], "config": config},
        "tokenizer": {"source": str(folder / "tokenizer")},
        "steps": STEPS,
        "batch_size": BATCH,
        "micro_batches": pieces,
        "precision": precision,
        "optim": {"learning_rate": RATE, "schedule": "constant", "weight_decay": 0.01, "max_grad_norm": CLIP},
        "strategy": {"name": "single"},
        "evaluate": {"every": 0},
        "launch": {"device": "cpu", "threads": 1, "processes": 1},
        "output": str(folder / "out"),
    }
    run = load(None, [], values)
    world = World(run)
    job = for_rank(run, world)
    join_ranks(job, world)
    session = build_session(job, world)
    keep_freed_memory()  # as `startup.try_a_step` does
    nothing = Nothing(run, world, job.data, session.feed.total)
    train(replace(session, checkpoints=nothing, sinks=Steps()), session.new_state())
    return meter.said(session.strategy.model, blocks_of(folder)[1])  # type: ignore[attr-defined]


SIDES: dict[str, Callable[[str, str, int, Path, int], dict[str, float]]] = {
    "bare loop": bare,
    "lockstep": lockstep,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Trainer": trainer,
}


def prepared(text: Path, tokenizer: Path, folder: Path) -> int:
    """Cut the blocks, and write the same text for lockstep. Returns the vocabulary size."""
    from transformers import GPT2Tokenizer

    made = GPT2Tokenizer.from_pretrained(tokenizer)
    ids = made(text.read_text(encoding="utf-8"))["input_ids"]
    blocks = torch.tensor(ids[: BATCH * (STEPS + 1) * LENGTH]).view(-1, LENGTH)
    torch.save(blocks, folder / "blocks.pt")
    made.save_pretrained(folder / "tokenizer")
    held, train = (made.decode(part.flatten()) for part in (blocks[:BATCH], blocks[BATCH:]))
    for name, part in (("held", held), ("train", train)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n", encoding="utf-8")
    return len(made)


def once(side: str, name: str, precision: str, pieces: int, folder: Path, vocabulary: int) -> dict[str, float]:
    """Do one run in its own process."""
    words = [side, name, precision, str(pieces), str(folder), str(vocabulary)]
    run = subprocess.run([sys.executable, __file__, "--one", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{side} failed:\n{run.stderr[-3000:]}")
    said: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return said


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over rounds: each contender at its better number of pieces, relative to the bare loop of the same
    round."""
    cells: dict[tuple[str, str], dict[str, dict[int, list[dict[str, Any]]]]] = {}
    for run in runs:
        sides = cells.setdefault((run["model"], run["precision"]), {})
        sides.setdefault(run["side"], {}).setdefault(run["pieces"], []).append(run)
    lines = ["| model | precision | | pieces | tokens a CPU second | beside the bare loop | peak, MiB | loss |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (name, precision), sides in cells.items():
        best = {side: max(by_pieces.values(), key=rate) for side, by_pieces in sides.items()}
        loop = {run["round"]: run["tokens_per_cpu_s"] for run in best["bare loop"]}
        for side, own in best.items():
            beside = sorted(run["tokens_per_cpu_s"] / loop[run["round"]] for run in own)
            shown = f"{statistics.median(beside):.2f} ({beside[0]:.2f} to {beside[-1]:.2f})"
            peak, loss = (statistics.median(run[key] for run in own) for key in ("peak_mib", "loss"))
            lines.append(
                f"| {name} | {precision} | {side} | {own[0]['pieces']} | {rate(own):,.0f} | {shown} | {peak:,.0f} | "
                f"{loss:.3f} |"
            )
    return "\n".join(lines)


def rate(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["tokens_per_cpu_s"] for run in runs)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        side, name, precision, pieces, folder, vocabulary = sys.argv[2:]
        print(json.dumps(SIDES[side](name, precision, int(pieces), Path(folder), int(vocabulary))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--pieces", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    known = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        vocabulary = prepared(known.text, known.tokenizer, folder)
        for number in range(known.rounds):
            for name in known.models:
                for precision in known.precisions:
                    for pieces in known.pieces:
                        losses = {}
                        for side in known.sides:
                            said = once(side, name, precision, pieces, folder, vocabulary)
                            losses[side] = said["loss"]
                            row = {
                                "round": number,
                                "model": name,
                                "precision": precision,
                                "side": side,
                                "pieces": pieces,
                            }
                            runs.append(row | said)
                            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                        if any(abs(loss / losses["bare loop"] - 1) > 0.05 for loss in losses.values()):
                            raise SystemExit(f"other losses after the same steps: {losses}")
    print(table(runs))
    if known.out is not None:
        machine = {"processor": processor(), "cores": os.cpu_count(), "allocator": allocator()}
        found = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "runs": runs}
        known.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
