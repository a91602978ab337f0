"""Weights that some micro-batches, some steps or no step uses: the bits of one process, and unused weights stay
unchanged."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.training.resolve import resolve_strategy
from support import odd_models
from support.harness import build_with_feed, digest, rank_0_of, run_on, tiny
from support.marks import long, slow
from support.messages import raises

ODD = "task.name=support.odd_models.Task"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 64}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 64}
OPT |= {"max_position_embeddings": 64, "layerdrop": 0.3}
LUKE = {**SIZES, "entity_vocab_size": 10, "entity_emb_size": 8}  # it never uses its entities here
WORDS = {"train": "wordpiece", "vocab_size": 400}
MODELS: dict[str, dict[str, Any]] = {
    "layerdrop": {"model": {"type": "opt", "config": OPT}},
    "unused": {"model": {"type": "luke", "config": LUKE}, "tokenizer": WORDS},
    "odd": {"task": {"name": "support.odd_models.Task"}},
}


def steps_of(world: World, run: Run) -> dict[str, Any]:
    """Return the norms of five steps, the names in each save, and all weights and moments."""
    _, strategy, feed = build_with_feed(run, world)
    found: dict[str, Any] = {"norms": [], "names": set(), "weights": []}
    for step in range(5):
        odd_models.step = step
        found["norms"].append(float(strategy.train_step(feed.make(step), 0.01).grad_norm))
        state = strategy.state.state_dict()
        found["names"].add(tuple(sorted(state)))
        if world.is_main:
            found["weights"].append({k: v.clone() for k, v in state.items()})
    found["digest"] = digest(state) if world.is_main else None
    strategy.close()
    return found


def of(model: str, name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    run = tiny(f"strategy.name={name}", *overrides, **MODELS[model])
    return rank_0_of(ranks, steps_of, run, alike=("norms",))


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Any]]:
    return {model: of(model, "single", 1) for model in MODELS}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "name", "ranks"),
    [
        ("layerdrop", "ddp", 3),
        ("layerdrop", "fsdp2", 3),
        ("unused", "ddp", 2),
        ("unused", "fsdp2", 1),
        ("unused", "fsdp2", 2),
        ("odd", "allreduce", 3),
        ("odd", "ddp", 2),
        ("odd", "ddp", 3),
        ("odd", "hf_trainer", 2),
        ("odd", "fsdp2", 1),
        ("odd", "fsdp2", 3),
        ("odd", "zero2", 2),
        ("unused", "zero3", 2),
        long("odd", "zero1", 3),
        long("unused", "zero2", 3),
        long("layerdrop", "allreduce", 2),
        long("layerdrop", "hf_accelerate", 2),
        slow("layerdrop", "hf_trainer", 3),
        long("unused", "hf_accelerate", 3),
        long("unused", "hf_trainer", 2),
        long("unused", "fsdp2", 3),
        long("odd", "hf_accelerate", 4),
    ],
)
def test_weights_used_by_some_micro_batches_keep_the_bits(model: str, name: str, ranks: int, single: dict) -> None:
    found = of(model, name, ranks)
    assert found["norms"] == single[model]["norms"]
    assert found["digest"] == single[model]["digest"]


@pytest.mark.processes
def test_without_exact_ddp_matches_within_rounding(single: dict) -> None:
    found = of("layerdrop", "ddp", 2, "strategy.exact=false")
    assert found["norms"][:2] == pytest.approx(single["layerdrop"]["norms"][:2], rel=1e-5)


@pytest.mark.processes
def test_weights_that_no_micro_batch_uses_do_not_change(single: dict) -> None:
    """Weight decay and momentum do not change a weight that no micro-batch of the step used; every save has the same
    names."""
    after = single["odd"]["weights"]
    for step, (before, now) in enumerate(pairwise(after), start=1):
        moved = {k for k, v in now.items() if k.startswith("model.") and not torch.equal(v, before[k])}
        assert not {k for k in moved if "never" in k or "aside" in k}
        assert ("model.early.weight" in moved) == (step == 1)
        assert "model.head.weight" in moved
    assert float(after[-1]["optimizer.step.never.weight"]) == 0
    assert float(after[-1]["optimizer.step.early.weight"]) == 1
    assert float(after[-1]["optimizer.step.head.weight"]) == 5
    assert 1 <= float(after[-1]["optimizer.step.sometimes.weight"]) <= 3
    assert len(single["odd"]["names"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize("stage", [2, slow(1), slow(3)])
def test_deepspeed_does_not_change_unused_weights_either(stage: int, single: dict) -> None:
    found, alone = of("unused", f"zero{stage}", 2, "strategy.exact=false"), single["unused"]
    assert found["norms"][:2] == pytest.approx(alone["norms"][:2], rel=1e-5)
    entities = [k for k in alone["weights"][-1] if k.startswith("model.") and "entity" in k]
    assert len(entities) == 6
    for key in entities:
        assert torch.equal(found["weights"][-1][key], alone["weights"][-1][key])


def failed(name: str, ranks: int, task: str, *overrides: str) -> str:
    run = tiny(f"strategy.name={name}", f"task.name=support.odd_models.{task}", *overrides)
    with pytest.raises(AssertionError) as caught:
        run_on(ranks, steps_of, run)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_no_gradient_anywhere_is_an_error(name: str, ranks: int) -> None:
    assert "RunError: no weight of the model gets a gradient" in failed(name, ranks, "Detached")


@pytest.mark.processes
def test_layers_that_only_some_ranks_run_are_an_error_of_fsdp2() -> None:
    assert "needs all ranks to run the same layers" in failed("fsdp2", 2, "OneOfTwo")


@pytest.mark.processes
def test_weights_of_another_precision_are_refused() -> None:
    assert "weights that are trained must be torch.float32" in failed("single", 1, "Doubled")


@pytest.mark.processes
def test_deepspeeds_own_reduction_refuses_weights_used_by_some_micro_batches() -> None:
    said = failed("zero1", 2, "Task", "strategy.exact=false")
    assert "DeepSpeed needs every micro-batch of a step to use the same weights" in said


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "pipeline"])
def test_engines_that_need_all_layers_are_refused_before_a_process_starts(name: str) -> None:
    marian = {"type": "marian", "config": {"encoder_layerdrop": 0.1}}
    with raises("LS4061" if name == "pipeline" else "LS4100", "model.config.encoder_layerdrop"):
        resolve_strategy(tiny(f"strategy.name={name}", model=marian), 2)
