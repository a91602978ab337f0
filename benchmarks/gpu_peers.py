"""The peers of benchmarks/gpu.py: one job under one of the ways people train it, in a process of its own.

In: `python gpu_peers.py JOB.json CONTENDER OUT.json`. Out: seconds of each step, seconds from the start of the process
to the end of the first step and of the last, memory held at most. Steps end with a synchronisation of the device.

  loop, loop_compiled                 a plain loop; torch.compile of the whole model
  trainer, trainer_liger, trainer_compiled   transformers' Trainer, with Liger-Kernel, with torch_compile
  accelerate                          a plain loop with Accelerate
An `adapter` in the job is put around the model by PEFT, on all of them; frozen weights in 4 bits are bitsandbytes'.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

RATE, CLIP = 5e-4, 1.0


class Clock:
    """Records the end of each step."""

    def __init__(self, device: str) -> None:
        self.device, self.ends = device, [time.time()]

    def step(self, *_: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.time())

    def told(self) -> dict[str, Any]:
        seconds = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        cuda = self.device == "cuda"
        return {
            "seconds": seconds,
            "first_s": self.ends[1] - BEGAN,
            "whole_s": self.ends[-1] - BEGAN,
            "held_gb": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        }


def model_of(job: dict[str, Any]) -> Any:
    """Build the model with random weights on the device, in float32; weights frozen by an adapter in bfloat16."""
    from transformers import AutoConfig, set_seed
    from transformers.models import auto

    set_seed(0)
    kind = "AutoModelForSequenceClassification" if job["labels"] else "AutoModelForCausalLM"
    entries = job["config"] | {"vocab_size": job["vocabulary"], "pad_token_id": 0}
    entries |= {"num_labels": job["labels"]} if job["labels"] else {"use_cache": False}
    config = AutoConfig.for_model(job["type"], **entries)
    dtype = torch.bfloat16 if job["adapter"] else torch.float32
    if job["quantization"]:
        model = quantized(job, getattr(auto, kind))
    else:
        with torch.device(job["device"]):
            model = getattr(auto, kind).from_config(config, dtype=dtype, attn_implementation="sdpa")
    if not job["adapter"]:
        return model.train()
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(**job["adapter"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train()


def quantized(job: dict[str, Any], kind: Any) -> Any:
    """Load the job's model with its linear layers in 4 bits."""
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=job["quantization"], bnb_4bit_compute_dtype=torch.bfloat16
    )
    place = {"quantization_config": how, "device_map": {"": job["device"]}}
    source = str(Path(job["folder"], "model"))
    model = kind.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="sdpa", **place)
    model.config.use_cache = False
    return model


def examples(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Token ids and labels from the job's folder."""
    rows: list[dict[str, list[int]]] = json.loads(Path(job["folder"], "tokens.json").read_text())
    return rows


def collated(job: dict[str, Any], rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row, as a collator of transformers does."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    if not job["labels"]:
        return {"input_ids": ids, "labels": ids}
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["label"] for row in rows])}


def micro_batches(job: dict[str, Any]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Micro-batches of each step, on the host."""
    rows, size = examples(job), job["batch"] // job["micro_batches"]
    for step in range(job["steps"]):
        chosen = [rows[(step * job["batch"] + i) % len(rows)] for i in range(job["batch"])]
        yield [collated(job, chosen[k : k + size]) for k in range(0, len(chosen), size)]


def optimizer_of(job: dict[str, Any], model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, fused=job["device"] == "cuda")


def loop(job: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """Train with a plain loop."""
    device = job["device"]
    model = model_of(job)
    forward = torch.compile(model) if compiled else model
    optimizer, clock = optimizer_of(job, model), Clock(device)
    for parts in micro_batches(job):
        for part in parts:
            inputs = {name: value.to(device) for name, value in part.items()}
            with torch.autocast(device, torch.bfloat16, enabled=job["precision"] == "bf16"):
                loss = forward(**inputs).loss / len(parts)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    return clock.told()


def accelerate(job: dict[str, Any]) -> dict[str, Any]:
    """Train with a plain Accelerate loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16" if job["precision"] == "bf16" else "no",
        gradient_accumulation_steps=job["micro_batches"],
        cpu=job["device"] == "cpu",
    )
    model = model_of(job)
    model, optimizer = accelerator.prepare(model, optimizer_of(job, model))
    clock = Clock(job["device"])
    for parts in micro_batches(job):
        for part in parts:
            with accelerator.accumulate(model):
                inputs = {name: value.to(accelerator.device) for name, value in part.items()}
                accelerator.backward(model(**inputs).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        clock.step()
    return clock.told()


def trainer(job: dict[str, Any], liger: bool = False, compiled: bool = False) -> dict[str, Any]:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cuda = job["device"] == "cuda"
    clock = Clock(job["device"])

    class Ends(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.ends = [time.time()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job["batch"] // job["micro_batches"],
        gradient_accumulation_steps=job["micro_batches"],
        max_steps=job["steps"],
        bf16=job["precision"] == "bf16",
        learning_rate=RATE,
        max_grad_norm=CLIP,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        use_cpu=not cuda,
        use_liger_kernel=liger,
        torch_compile=compiled,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        disable_tqdm=True,
    )
    trained = Trainer(
        model=model_of(job),
        args=arguments,
        train_dataset=examples(job),  # type: ignore[arg-type]
        data_collator=lambda rows: collated(job, rows),
        callbacks=[Ends()],
    )
    trained.train()
    return clock.told()


CONTENDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "loop": loop,
    "loop_compiled": lambda job: loop(job, compiled=True),
    "trainer": trainer,
    "trainer_liger": lambda job: trainer(job, liger=True),
    "trainer_compiled": lambda job: trainer(job, compiled=True),
    "accelerate": accelerate,
}

if __name__ == "__main__":
    told = CONTENDERS[sys.argv[2]](json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(told))
