"""Combined keys of memory and speed keep the bits of `single` under every strategy that does not refuse them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks
from lockstep.tasks.models import chunked_loss
from lockstep.training.resolve import resolve_strategy
from support.harness import TINY, build_with_feed, digest, run_on
from support.marks import long
from support.task_runs import BERT, GPT2, MARIAN, TASKS, make

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LLAMA = {
    "type": "llama",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "attention_dropout": 0.1,
    },
}
STEPS = 2
QUIET = {"samples": 0}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"model": BERT, "data": TINY["data"]},
    "gpt2": {"model": GPT2, "task": TASKS["documents"]["task"] | QUIET},
    "llama": {"model": LLAMA, "task": TASKS["documents"]["task"] | QUIET},
    "packed": {"model": GPT2, "task": TASKS["packed"]["task"] | QUIET},
    "packed llama": {"model": LLAMA, "task": TASKS["packed"]["task"] | QUIET},
    "marian": {"model": MARIAN, "task": TASKS["translation"]["task"] | QUIET | {"bleu": False}},
}
FOLDERS = {"gpt2": "documents", "llama": "documents", "packed": "packed", "packed llama": "packed"}
AGAIN, CHUNK, APART = "model.checkpoint_activations=true", "task.loss_chunk=16", "task.attend_across_documents=false"
FP16, BF16, LOW = ("precision=fp16",), ("precision=bf16",), ("precision=bf16", "model.dtype=bfloat16")

# Kind of run and keys. Layers are laid end to end in all of them (`data.padding: none`).
CASES: dict[str, list[tuple[str, ...]]] = {
    "again": [(kind, AGAIN) for kind in ("bert", "gpt2", "llama", "marian")],
    "fp16": [(kind, AGAIN, *FP16) for kind in ("bert", "gpt2", "llama", "marian")],
    "low": [
        *((kind, *LOW) for kind in ("bert", "gpt2", "llama", "marian")),
        *((kind, CHUNK, AGAIN, *LOW) for kind in ("gpt2", "marian")),
        ("bert", "optim.master_weights=false", *LOW),
    ],
    "chunk": [
        *((kind, CHUNK, AGAIN) for kind in ("gpt2", "marian")),
        *((kind, CHUNK, AGAIN, *BF16) for kind in ("gpt2", "llama")),
    ],
    "chunk, others": [("llama", CHUNK, AGAIN), ("marian", CHUNK, AGAIN, *BF16)],
    "apart": [
        *(("packed llama", APART, *how) for how in (LOW, FP16)),
        *(("packed", APART, *how) for how in ((), (CHUNK, AGAIN, *BF16))),
        ("packed llama", APART, AGAIN),
    ],
}
STRATEGIES = {
    "single": (),
    "ddp": (),
    "fsdp2 step": ("strategy.options.gather=step",),
    "fsdp2 micro_batch": ("strategy.options.gather=micro_batch",),
    "hf_accelerate": (),
    "pipeline": ("strategy.options.stages=2",),
}
REFUSED = {  # who says that a group's runs, or those with a key, cannot be
    "pipeline": ("model.dtype=bfloat16",),
    "fsdp2 micro_batch": ("optim.master_weights=false",),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for kind in ("documents", "packed", "translation"):
        make(folder, kind)
    return folder


def run_of(folder: Path, name: str, kind: str, *keys: str) -> Run:
    read = {"source": str(folder / FOLDERS.get(kind, "translation")), "max_length": 32}
    values = TINY | {"data": read} | KINDS[kind] | {"steps": STEPS, "micro_batches": 3, "output": str(folder / "out")}
    return load(None, [f"strategy.name={name.split()[0]}", *STRATEGIES[name], *keys], values)


def check(run: Run, ranks: int) -> None:
    """Raise the refusals that come before any process starts. Errors: `RunError`."""
    task: Any = plugins.find("tasks", run.task.name)
    if task.chunks_loss:
        chunked_loss.check(Job.of(run))
    resolve_strategy(run, ranks)
    blocks.check(Job.of(run), here=True)


def trained(world: World, runs: list[Run]) -> list[dict[str, Any]]:
    """Train two steps of each run; the second step continues from the first."""
    found = []
    for run in runs:
        _, strategy, feed = build_with_feed(run, world)
        strategy.dry_run(feed.longest())
        rates = [learning_rate(run.optim, t + 1, STEPS) for t in range(STEPS)]
        results = [strategy.train_step(feed.make(t), rate) for t, rate in enumerate(rates)]
        # a frozen bfloat16 weight is float32 in FSDP's shards: the same number
        state = {name: tensor.float() for name, tensor in strategy.state.state_dict().items()}
        exported = strategy.state.export()
        found.append(
            {
                "loss": [float(r.loss) for r in results],
                "norm": [float(r.grad_norm) for r in results],
                "state": digest(state) if world.is_main else "",
                "export": digest(exported) if exported else "",
            }
        )
        strategy.close()
    return found


@cache
def of(folder: Path, group: str, name: str) -> list[dict[str, Any] | None]:
    """Return the results of each case; None if the strategy refuses it."""
    ranks = 1 if name == "single" else 2
    found: list[dict[str, Any] | None] = []
    runs = []
    for kind, *keys in CASES[group]:
        run = run_of(folder, name, kind, *keys)
        refused = any(key.startswith(REFUSED.get(name, ())) for key in keys)
        if refused:
            with pytest.raises(RunError, match=r"^(model\.dtype|optim\.master_weights): "):
                check(run, ranks)
        else:
            check(run, ranks)
            runs.append(run)
        found.append(None if refused else {})
    done = run_on(ranks, trained, runs, timeout_s=600) if runs else [[]]
    for rank in done[1:]:
        assert [each["loss"] for each in rank] == [each["loss"] for each in done[0]]
    results = iter(done[0])
    return [None if each is None else next(results) for each in found]


def is_long(group: str, name: str) -> bool:
    """`hf_accelerate` makes the steps of `ddp`, and each group runs under one of the two kinds of `fsdp2`;
    test_precision.py has fp16 under each strategy."""
    other = "fsdp2 step" if group in ("low", "chunk") else "fsdp2 micro_batch"
    return name in ("ddp", "hf_accelerate", other) or group in ("again", "chunk, others", "fp16")


@pytest.mark.parametrize(
    ("group", "name"),
    [long(g, n) if is_long(g, n) else (g, n) for g in CASES for n in STRATEGIES if n != "single"],
)
def test_keys_together_have_the_bits_of_single(data: Path, group: str, name: str) -> None:
    for keys, one, found in zip(CASES[group], of(data, group, "single"), of(data, group, name), strict=True):
        assert found is None or found == one, keys


def test_recomputed_layers_have_the_same_bits(data: Path) -> None:
    """This holds for unpadded texts, in float32 and fp16, and with a chunked loss."""
    pairs = [("bert", *FP16), ("gpt2", CHUNK), ("marian", CHUNK, *BF16), ("llama", *LOW)]
    runs = [run_of(data, "single", kind, *keys, *more) for kind, *keys in pairs for more in ((), (AGAIN,))]
    found = run_on(1, trained, runs, timeout_s=600)[0]
    assert found[::2] == found[1::2]
