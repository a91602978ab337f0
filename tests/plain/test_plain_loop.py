"""A full run compared with a short loop of torch and transformers: losses, rates, norms, the weight average, scores.

Every step uses all examples, so their order does not matter; dropout is off. The loop shares nothing with
lockstep but the files that both read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

from lockstep.cli import main

STEPS, WARMUP, DECAY, RATE, CLIP = 6, 2, 0.8, 0.02, 0.05
WORDS = ["the", "a", "dog", "cat", "sees", "likes", "big", "red", "house", "runs", "yes", "no"]
ROWS = [
    ("the dog sees", "a cat"),
    ("a big red dog runs", "yes yes yes no yes"),
    ("the cat", "likes the red house"),
    ("no", "the dog"),
    ("the house sees a big dog", "no"),
    ("a cat likes a cat likes", "yes"),
    ("the dog", "sees the big red house yes no no"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers, rows, and a finished run."""
    folder = tmp_path_factory.mktemp("plain")
    vocabulary = {word: place for place, word in enumerate(["<end>", "<pad>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>").save_pretrained(
        folder / "model"
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": len(vocabulary)}
    still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**sizes, **still)).save_pretrained(folder / "model")
    for split, some in (("train", ROWS), ("validation", ROWS[2:5])):
        lines = [json.dumps({"asked": asked, "told": told}) for asked, told in some]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    run = {
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")},
        "model": {"source": str(folder / "model")},
        "task": {"name": "language_modeling", "prompt": "asked", "response": "told", "block_size": 32, "samples": 0},
        "steps": STEPS,
        "batch_size": len(ROWS),
        "micro_batches": 3,
        "optim": {"learning_rate": RATE, "warmup_steps": WARMUP, "weight_decay": 0.1, "max_grad_norm": CLIP},
        "average": {"ema": DECAY, "ema_warmup": False},
        "evaluate": {"every": 3},
        "track": {"every": 1},
        "strategy": "single",
        "launch": {"device": "cpu", "threads": 1},
        "output": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder


def batch(rows: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, mask and labels of all rows, padded together; labels outside the response are -100."""
    number = {word: place for place, word in enumerate(["<end>", "<pad>", *WORDS])}
    held = [([number[w] for w in asked.split()], [number[w] for w in told.split()] + [0]) for asked, told in rows]
    width = max(len(asked) + len(told) for asked, told in held)
    ids, mask = torch.full((len(rows), width), 1), torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (asked, told) in enumerate(held):
        both = [*asked, *told]
        ids[row, : len(both)], mask[row, : len(both)] = torch.tensor(both), 1
        labels[row, len(asked) : len(both)] = torch.tensor(told)
    return ids, mask, labels


def loss_of(model: Any, rows: list[tuple[str, str]]) -> torch.Tensor:
    ids, mask, labels = batch(rows)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def looped(folder: Path) -> tuple[list[dict[str, float]], dict[int, float], dict[str, torch.Tensor]]:
    """Return each step's numbers, the scores of the weight average after some steps, and the final average."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").train()
    plain = [p for n, p in model.named_parameters() if p.ndim > 1]
    exempt = [p for n, p in model.named_parameters() if p.ndim == 1]  # biases and norms
    groups = [{"params": plain, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps, scores = [], {}
    for step in range(1, STEPS + 1):
        rate = schedule.get_last_lr()[0]
        optimizer.zero_grad()
        loss = loss_of(model, ROWS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        steps.append({"loss": float(loss.detach()), "grad_norm": float(norm), "learning_rate": rate})
        with torch.no_grad():
            for name, p in model.named_parameters():
                mean[name] = DECAY * mean[name] + (1 - DECAY) * p
            if step % 3 == 0:
                kept = {name: p.clone() for name, p in model.named_parameters()}
                model.load_state_dict(mean, strict=False)
                scores[step] = float(loss_of(model.eval(), ROWS[2:5]).detach())
                model.load_state_dict(kept, strict=False)
                model.train()
    return steps, scores, mean


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[dict[str, float]], dict[int, float], dict[str, torch.Tensor]]:
    return looped(folder)


def lines(folder: Path, split: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["split"] == split]


def test_losses_norms_and_rates_equal_those_of_the_loop(folder: Path, plain: Any) -> None:
    steps = lines(folder, "train")
    assert len(steps) == STEPS
    for ours, theirs in zip(steps, plain[0], strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4), ours["step"]
    assert all(ours["grad_norm"] > CLIP for ours in steps)  # control: the gradient is clipped


def test_average_is_evaluated_and_exported(folder: Path, plain: Any) -> None:
    scores = {line["step"]: line["loss"] for line in lines(folder, "validation")}
    assert scores == pytest.approx(plain[1], rel=1e-4)
    exported = load_file(folder / "out/export/model.safetensors")
    for name, mean in plain[2].items():
        if name in exported:
            assert torch.allclose(exported[name], mean, atol=1e-5), name
    assert len(exported.keys() & plain[2].keys()) > 20
    start = load_file(folder / "model/model.safetensors")  # control: the weights moved far
    assert not any(torch.allclose(exported[n], start[n], atol=1e-3) for n in exported if exported[n].ndim > 1)
