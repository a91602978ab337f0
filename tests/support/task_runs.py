"""Small runs of every task on generated data, for tests of the promise.

In: a folder for data. Out: runs of seconds, with dropout, effective clipping, and unequal target counts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from lockstep.config.run import Run, load
from lockstep.distributed.world import World
from lockstep.training.evaluation import evaluate
from support.harness import TINY, build_with_feed, digest

WORDS = [
    "a",
    "the",
    "dog",
    "cat",
    "bird",
    "runs",
    "sees",
    "likes",
    "big",
    "small",
    "red",
    "old",
    "house",
    "near",
    "over",
]
GPT2 = {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48}}
MARIAN = {
    "type": "marian",
    "config": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "dropout": 0.1,
    },
}
BERT = {
    "type": "bert",
    "config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
}


def sentence(draw: random.Random, most: int = 14) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most))) + draw.choice([".", "!", " , so ."])


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def rows_of(kind: str, draw: random.Random) -> dict[str, Any]:
    """One generated example."""
    text = sentence(draw)
    if kind == "translation":
        return {"translation": {"en": text, "de": " ".join(w[::-1] + "ü" for w in text.split())}}
    if kind == "prompts":
        return {"question": text, "answer": " ".join(sentence(draw, 3) for _ in range(draw.choice([1, 1, 4])))}
    if kind == "messages":
        said = "yes ." if draw.random() < 0.7 else f"{sentence(draw, 14)} {sentence(draw, 14)}"  # very unequal lengths
        turns = [("user", sentence(draw, 5)), ("assistant", said), ("user", "why ."), ("assistant", "no .")]
        return {"messages": [{"role": role, "content": said} for role, said in turns[: draw.choice([2, 2, 4])]]}
    if kind == "questions":
        words = draw.choices(WORDS, k=draw.randint(3, 40))
        at = draw.randrange(len(words))
        answer = {"text": [words[at]], "answer_start": [len(" ".join(words[:at])) + (at > 0)]}
        return {"question": f"where is {words[at]}", "context": " ".join(words), "answers": answer}
    if kind == "pairs":
        other = sentence(draw)
        both = {*text.split()} & {*other.split()}
        turned = " ".join(w[::-1] for w in text.split())
        return {"anchor": text, "positive": turned, "negative": other, "score": len(both) / 4}
    if kind == "token_classification":
        words = text.split()
        tags = ["B-ANIMAL" if w in ("dog", "cat", "bird") else "O" for w in words]
        tags = ["I-ANIMAL" if t == "B-ANIMAL" and i and tags[i - 1] != "O" else t for i, t in enumerate(tags)]
        return {"tokens": words, "tags": tags}
    if kind in ("preference", "reward"):
        return {"prompt": text, "chosen": sentence(draw, 6) + " yes", "rejected": sentence(draw, 6) + " no"}
    return {"text": text}


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TASKS: dict[str, dict[str, Any]] = {
    "packed": {"task": {"name": "language_modeling", "block_size": 24}, "model": GPT2},
    "documents": {"task": {"name": "language_modeling", "block_size": 24, "packing": False}, "model": GPT2},
    "prompts": {
        "task": {"name": "language_modeling", "prompt": "question", "response": "answer", "block_size": 40},
        "model": GPT2,
    },
    "messages": {
        "task": {"name": "language_modeling", "messages": "messages", "chat_template": TEMPLATE, "block_size": 48},
        "model": GPT2,
    },
    "translation": {"task": {"name": "translation", "source": "en", "target": "de"}, "model": MARIAN},
    "token_classification": {"task": {"name": "token_classification"}, "model": BERT},
    "preference": {"task": {"name": "preference"}, "model": GPT2},
    "reward": {"task": {"name": "reward"}, "model": BERT},
    "masked": {"task": {"name": "masked_language_modeling"}, "model": BERT},
    "questions": {"task": {"name": "question_answering", "stride": 6}, "model": BERT},
    "pairs": {"task": {"name": "embedding", "negative": "negative"}, "model": BERT},
}


def make(folder: Path, kind: str, *overrides: str, count: int = 90) -> Run:
    """A run of one kind, on data written to `folder`."""
    draw = random.Random(kind)
    (folder / kind).mkdir(parents=True, exist_ok=True)
    for split, number in (("train", count), ("validation", 15)):
        path = folder / kind / f"{split}.jsonl"
        if not path.exists():
            write(path, [rows_of(kind, draw) for _ in range(number)])
    values = (
        TINY | TASKS[kind] | {"data": {"source": str(folder / kind), "max_length": 32}, "output": str(folder / "out")}
    )
    return load(None, list(overrides), values | {"tokenizer": {"train": "bpe", "vocab_size": 400}})


STEPS = 3


def trained(world: World, run: Run) -> dict[str, Any]:
    """A few steps, scores and samples."""
    task, strategy, feed = build_with_feed(run, world)
    batches = [feed.make(t) for t in range(STEPS)]
    results = [strategy.train_step(batch, 5e-3) for batch in batches]
    counts = [[int(task.targets_in_batch(m.targets)) for m in b.micro_batches] for b in batches]
    scores = evaluate(world, task, strategy, task.splits["validation"])
    found = {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "scores": scores,
        "samples": task.samples(strategy.generate, strategy.forward),
        "counts": counts,
        "targets": [b.targets for b in batches],
    }
    state = strategy.state.state_dict()
    strategy.close()
    return found | {"digest": digest(state) if world.is_main else None}
