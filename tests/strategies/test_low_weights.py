"""bfloat16 weights: trained with and without float32 masters, and frozen under an adapter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from lockstep.config.run import Run
from lockstep.distributed.system_metrics import tensor_bytes
from lockstep.distributed.world import World
from lockstep.strategies.exact import stepper
from lockstep.strategies.observer import GradientRecorder
from lockstep.tasks.models import storage_dtype
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from lockstep.training.summary import precisions
from support.counted_memory import MODEL, measured_bytes, near
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.messages import raises

LOW = ("model.dtype=bfloat16", "precision=bf16", "data.padding=batch")
WITHOUT = (*LOW, "optim.master_weights=false")
STEP, MICRO_BATCH = "strategy.options.gather=step", "strategy.options.gather=micro_batch"


def steps_of(world: World, run: Run, steps: int = 4) -> dict[str, Any]:
    task, strategy, feed = build_with_feed(run, world)
    strategy.dry_run(feed.longest())
    results = [strategy.train_step(feed.make(t), 1e-3) for t in range(steps)]
    state = strategy.state.state_dict()
    scores = evaluate(world, task, strategy, task.splits["validation"])
    exported = strategy.state.export()
    strategy.close()
    return {
        "digest": digest(state) if world.is_main else "",
        "state": {k: v.clone() for k, v in state.items()} if world.is_main else {},
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "scores": scores,
        "export": {k: v.detach().cpu().clone() for k, v in exported.items()} if exported else {},
    }


@cache
def of(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    run = tiny(f"strategy.name={name}", *overrides)
    return run_on(ranks, steps_of, run, timeout_s=90)[0]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("loss", "norm", "scores", "digest"):
        assert one[key] == other[key], key
    assert digest(one["export"]) == digest(other["export"])


HERE = [("allreduce", 3), ("ddp", 2), ("hf_accelerate", 2), ("hf_trainer", 2)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        *((name, ranks, ()) for name, ranks in HERE),
        ("fsdp2", 2, (MICRO_BATCH,)),
        ("fsdp2", 3, (MICRO_BATCH,)),
        ("fsdp2", 3, (STEP,)),
    ],
)
def test_with_masters_the_bits_of_single(name: str, ranks: int, more: tuple[str, ...]) -> None:
    same(of(name, ranks, *LOW, *more), of("single", 1, *LOW))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "more"), [*((name, ranks, ()) for name, ranks in HERE), ("fsdp2", 2, (STEP,))]
)
def test_without_masters_the_bits_of_single(name: str, ranks: int, more: tuple[str, ...]) -> None:
    same(of(name, ranks, *WITHOUT, *more), of("single", 1, *WITHOUT))


def beside_float32(world: World, run: Run) -> tuple[float, float, bool, str]:
    """Compare masters after a few steps with float32 weights that torch's AdamW updates with the same gradients. Return
    the largest difference, how far the weights moved, whether the model's weights are the rounded masters, and the
    summary's line about formats."""
    _, strategy, feed = build_with_feed(run, world)
    start = {n: p.detach().float().clone() for n, p in strategy.weights.named.items()}
    theirs = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    exempt = stepper.without_decay(strategy.model)
    decays = [(run.optim.weight_decay, [p for n, p in theirs.items() if n not in exempt])]
    decays += [(0.0, [p for n, p in theirs.items() if n in exempt])]
    other = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in decays],
        lr=1e-3,
        betas=run.optim.betas,
        eps=run.optim.eps,
        foreach=False,
    )

    strategy.observer = recorder = GradientRecorder(world)
    for t in range(4):
        strategy.train_step(feed.make(t), 1e-3)
        for name, gradient in recorder.gradients.items():
            theirs[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), run.optim.max_grad_norm)
        other.step()
    state = strategy.state.state_dict()
    apart = max(float((state[f"model.{n}"].float() - p.detach()).abs().max()) for n, p in theirs.items())
    went = max(float((p.detach() - start[n]).abs().max()) for n, p in theirs.items())
    rounded = all(torch.equal(p.detach(), state[f"model.{n}"].bfloat16()) for n, p in strategy.weights.named.items())
    return apart, went, rounded, precisions(strategy)


@pytest.mark.processes
def test_master_weights_equal_float32_weights() -> None:
    run = tiny("strategy.name=single", *LOW)
    apart, went, rounded, formats = run_on(1, beside_float32, run)[0]
    assert rounded
    assert formats == "compute in bf16, weights in bfloat16, moments in float32"
    assert apart < 1e-6 < 1e-3 < went
    run = tiny("strategy.name=single", *WITHOUT)  # control: updates below a weight's last bit are lost
    assert run_on(1, beside_float32, run)[0][0] > 1e-5


@pytest.mark.processes
def test_dtypes_of_checkpoint_and_export() -> None:
    found, without = of("single", 1, *LOW), of("single", 1, *WITHOUT)
    weight = "model.transformer.h.0.mlp.c_fc.weight"
    assert found["state"][weight].dtype == torch.float32
    assert not torch.equal(found["state"][weight], found["state"][weight].bfloat16().float())
    assert without["state"][weight].dtype == torch.bfloat16
    for each in (found, without):
        assert {t.dtype for n, t in each["export"].items() if n.endswith("weight")} == {torch.bfloat16}
        assert {t.dtype for n, t in each["state"].items() if "exp_avg" in n} == {torch.float32}


def switched(world: World, run: Run, names: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return the states of strategies that resume another one's state after two steps."""
    task, first = build(run, world)
    feed = StepLoader(task, first.own_micro_batches(), world.device)
    for t in range(2):
        first.train_step(feed.make(t), 1e-3)
    weights = world.broadcast({k: v.clone() for k, v in first.state.state_dict().items()})
    strategies, ends = [first], []
    for name, options in names:
        section = run.strategy.model_copy(update={"name": name, "options": options})
        _, other = build(run.model_copy(update={"strategy": section}), world)
        other.state.load_state_dict(weights)
        strategies.append(other)
    for strategy in strategies:
        mine = StepLoader(task, strategy.own_micro_batches(), world.device)
        strategy.train_step(mine.make(2), 1e-3)
        state = strategy.state.state_dict()
        ends.append(digest(state) if world.is_main else "")
    return ends


@pytest.mark.processes
@pytest.mark.parametrize("low", [LOW, WITHOUT])
def test_every_strategy_resumes_another_ones_state(low: tuple[str, ...]) -> None:
    names: list[Any] = [("ddp", {}), ("fsdp2", {"gather": "step"})]
    names += [("fsdp2", {"gather": "micro_batch"})] if low == LOW else []
    run = tiny("strategy.name=allreduce", *low)
    ends = run_on(2, switched, run, names)[0]
    assert len(set(ends)) == 1


@pytest.mark.processes
@pytest.mark.parametrize(("low", "formula"), [(LOW, 2 + 4 + 8), (WITHOUT, 2 + 8), ((), 4 + 8)])
def test_bytes_per_parameter_between_steps(low: tuple[str, ...], formula: int) -> None:
    run = tiny("strategy.name=single", *low, model=MODEL)
    found = run_on(1, measured_bytes, run, {})[0]
    assert near(found["rest"], formula * found["all"]), found["rest"] / found["all"]


REFUSED = [
    (["model.dtype=bfloat16"], ("LS4161",)),
    (["optim.master_weights=false"], ("LS4160",)),
    ([*LOW, "strategy.exact=false"], ("LS4163",)),
    ([*LOW, "strategy.name=pipeline"], ("LS4162",)),
    ([*LOW, "strategy.name=zero2"], ("LS4162", "zero2")),
    ([*WITHOUT, "strategy.name=fsdp2", MICRO_BATCH], ("LS4164",)),
    ([*LOW, "strategy.name=fsdp2", "strategy.options.param_dtype=bf16"], ("LS4074", "strategy.options.param_dtype")),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_incompatible_keys_are_refused(overrides: list[str], said: tuple[str, ...]) -> None:
    with raises(*said) as caught:
        resolve_strategy(tiny(*overrides), 2)
    assert "\n" not in str(caught.value)


# -- frozen weights under an adapter ---------------------------------------------------------------------------------

ADAPTER = {"source": "somewhere", "adapter": {"r": 4}}


class Layers(torch.nn.Module):
    """One layer of each kind that is stored in bfloat16, with values that bfloat16 represents exactly, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = torch.nn.Embedding(50, 24), torch.nn.Linear(24, 40)
        self.conv, self.norm = Conv1D(24, 40), torch.nn.LayerNorm(24)
        for parameter in self.parameters():
            parameter.data = torch.randn_like(parameter).bfloat16().float()
            parameter.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(ids) * self.scale)
        return self.norm(self.conv(torch.nn.functional.gelu(self.linear(hidden))) + hidden)


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
def test_frozen_bfloat16_matrices_give_the_bits_of_float32_ones(low: torch.dtype | None) -> None:
    run, ends = tiny(model=ADAPTER), []
    assert run.model.dtype == "bfloat16"  # the default with an adapter
    for settled in (False, True):
        model = storage_dtype.cast_weights(run.model, Layers()) if settled else Layers()
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            output = model(torch.arange(30).view(3, 10))
        output.float().square().sum().sqrt().backward()
        ends.append((output.detach(), model.scale.grad))
        dtypes = [model.table.weight.dtype, model.linear.weight.dtype, model.conv.weight.dtype]
        assert dtypes == [torch.bfloat16 if settled else torch.float32] * 3
        assert model.norm.weight.dtype == model.linear.bias.dtype == torch.float32
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_autograd_keeps_no_float32_matrix() -> None:
    model = storage_dtype.cast_weights(tiny(model=ADAPTER).model, Layers())
    before = tensor_bytes()
    x = torch.randn(1, 24, requires_grad=True)
    output = model.linear(x)
    assert tensor_bytes() - before < 24 * 40 * 4  # the size of the widened weight
    output.sum().backward()


@pytest.mark.parametrize("published", [None, "bfloat16"])
def test_a_merged_model_has_the_dtype_it_was_published_in(published: str | None) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16)
    base = transformers.GPT2LMHeadModel(config)
    wanted = base.transformer.h[0].attn.c_attn.weight.detach().bfloat16().float()
    asked = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = storage_dtype.cast_weights(tiny(model=ADAPTER).model, peft.get_peft_model(base, asked))
    lora = next(m for n, m in model.named_modules() if n.endswith("c_attn"))
    wanted += lora.get_delta_weight("default").detach()
    whole = storage_dtype.merged(model, low=published == "bfloat16")
    found = whole.transformer.h[0].attn.c_attn.weight.detach()
    dtype = torch.bfloat16 if published else torch.float32
    assert {p.dtype for p in whole.parameters()} == {dtype} == {whole.config.dtype}
    assert torch.equal(found, wanted.to(dtype))
