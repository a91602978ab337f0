"""Preferences and rewards beside TRL: which ending of a caption is the real one. A small GPT-2 that has read captions.

In: the data folder. Out: how often the real ending has the larger reward, and by how much, of
the test pairs, computed here in the same way for both models.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import texts
import torch
from sides import Recipe, ours, settings

FIRST = Recipe(rows=8000, batch=64, rate=3e-3, micro_batches=2)
PAIRS = Recipe(rows=640, batch=32, rate=3e-4, micro_batches=2)
REWARDS = Recipe(rows=1600, batch=32, rate=1e-3, epochs=2, micro_batches=2)
END = "<|endoftext|>"
GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64}


def tokenizer(file: Path) -> Any:
    """Byte-level BPE as GPT-2's, of the captions."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(
        (row["text"] for row in texts.read(file)), 4000, special_tokens=[END], show_progress=False
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, eos_token=END, bos_token=END, unk_token=END, pad_token=END
    )


def starter(data: Path, room: Path) -> Path:
    """The model that both sides start from, trained once."""
    if not (room / "run" / "export").exists():
        rows = [{"text": row["en"]} for row in texts.captions(data, "train", FIRST.rows + 200)]
        folder = texts.write(room / "data", train=rows[:-200], validation=rows[-200:])
        task = {"name": "language_modeling", "packing": False, "block_size": 64, "samples": 0}
        tokenizer(folder / "train.jsonl").save_pretrained(room / "tokenizer")
        ours(
            room / "run",
            FIRST,
            0,
            task,
            {"type": "gpt2", "config": GPT2},
            folder,
            tokenizer={"source": str(room / "tokenizer")},
        )
    return room / "run" / "export"


def said(model: Any, tokenizer: Any, rows: list[dict], name: str) -> torch.Tensor:
    """Log-probability of each answer after its prompt, with the end token: float64 [N]."""
    found = []
    for row in rows:
        asked = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([asked + tokenizer(row[name])["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0].double().log_softmax(1)
        found.append(logs[range(len(asked) - 1, ids.shape[1] - 1), ids[0, len(asked) :]].sum())
    return torch.stack(found)


def preferred(model: Any, before: Any, tokenizer: Any, rows: list[dict], beta: float = 0.1) -> dict[str, float]:
    """Against the model before training, as DPO's rewards are; `likelier`: without it."""
    sides = [said(m.eval(), tokenizer, rows, name) for m in (model, before) for name in ("chosen", "rejected")]
    margin = beta * (sides[0] - sides[2] - sides[1] + sides[3])
    return {
        "accuracy": float((margin > 0).double().mean()),
        "margin": float(margin.mean()),
        "likelier": float((sides[0] > sides[1]).double().mean()),
    }


def rewarded(model: Any, tokenizer: Any, rows: list[dict]) -> dict[str, float]:
    found = []
    for row in rows:
        both = [tokenizer(row["prompt"])["input_ids"] + tokenizer(row[n])["input_ids"] for n in ("chosen", "rejected")]
        with torch.no_grad():
            found.append([float(model.eval()(torch.tensor([[*i, tokenizer.eos_token_id]])).logits) for i in both])
    told = torch.tensor(found)
    apart = told[:, 0] - told[:, 1]
    return {"accuracy": float((apart > 0).double().mean()), "margin": float(apart.mean())}


def preference(loss: str, data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    import transformers
    import trl
    from datasets import Dataset

    begun = starter(data, room.parent / "starter")
    folder = texts.endings(data, room / "data", PAIRS.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(begun)
    first = transformers.AutoModelForCausalLM.from_pretrained(begun)
    mine = ours(room / "ours", PAIRS, seed, {"name": "preference", "loss": loss}, {"source": str(begun)}, folder)
    learned, kind = copy.deepcopy(first), {"dpo": "sigmoid"}.get(loss, loss)
    arguments = trl.DPOConfig(**settings(room / "theirs", PAIRS, seed), beta=0.1, loss_type=[kind], max_length=64)
    trl.DPOTrainer(
        learned, None, arguments, train_dataset=Dataset.from_list(train), processing_class=tokenizer
    ).train()  # fmt: skip
    export = transformers.AutoModelForCausalLM.from_pretrained(mine["export"])
    return {
        "before": preferred(first, first, tokenizer, test),
        "lockstep": preferred(export, first, tokenizer, test),
        "TRL": preferred(learned, first, tokenizer, test),
        "lockstep, as it says": mine["scores"],
    }


def reward(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    import transformers
    import trl
    from datasets import Dataset

    begun = starter(data, room.parent / "starter")
    folder = texts.endings(data, room / "data", REWARDS.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(begun)
    mine = ours(room / "ours", REWARDS, seed, {"name": "reward"}, {"source": str(begun)}, folder)
    transformers.set_seed(seed)
    learned = transformers.AutoModelForSequenceClassification.from_pretrained(begun, num_labels=1)
    learned.config.pad_token_id = tokenizer.pad_token_id
    arguments = trl.RewardConfig(**settings(room / "theirs", REWARDS, seed), max_length=64)
    trl.RewardTrainer(learned, arguments, train_dataset=Dataset.from_list(train), processing_class=tokenizer).train()
    export = transformers.AutoModelForSequenceClassification.from_pretrained(mine["export"])
    return {
        "lockstep": rewarded(export, tokenizer, test),
        "TRL": rewarded(learned, tokenizer, test),
        "lockstep, as it says": mine["scores"],
    }


RECIPES = {loss: partial(preference, loss) for loss in ("dpo", "ipo", "hinge")} | {"reward": reward}
