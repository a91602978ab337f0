"""`model.checkpoint_activations` and `model.offload_activations` save memory for activations and keep the bits."""

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks
from support.harness import run_on, tiny
from support.marks import long, slow
from support.messages import mentions, raises
from support.strategy_runs import NAMES, steps_of
from support.tensor_writes import Written

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

AGAIN = "model.checkpoint_activations=true"
FAMILIES = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32},
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "attention_dropout": 0.1,
    },
    "t5": {"d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64},
}


def here(*overrides: str, **values: Any) -> dict[str, Any]:
    """Return the results of two steps in this process; the second starts with the weights and moments of the first."""
    run = tiny("strategy.name=single", *overrides, **values)
    return steps_of(World(run), run, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_keep_the_bits(family: str, precision: str) -> None:
    """Recomputed activations keep the bits, with dropout and with the weight casts that autocast caches."""
    model = {"model": {"type": family, "config": FAMILIES[family]}}
    plain, again = (here(f"precision={precision}", *more, **model) for more in ((), (AGAIN,)))
    assert again["digest"] == plain["digest"]
    assert again["loss"] == plain["loss"]


def test_the_control_new_dropout_masks_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the bits differ if backward draws new dropout masks."""
    plain = here()

    def carelessly(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(*args, **kwargs, preserve_rng_state=False)

    monkeypatch.setattr(blocks, "checkpoint", carelessly)
    assert here(AGAIN)["digest"] != plain["digest"]


def each(world: World, runs: list[Run]) -> list[dict[str, Any]]:
    return [steps_of(world, run, 3) for run in runs]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, "fp32") for n in NAMES if n != "single"]
    + [slow("zero3", "bf16")]  # exact strategies run in bf16 with other keys in test_pairs_of_keys.py
    + [long(n, "bf16") for n in NAMES if n not in ("single", "zero3")],
)
def test_every_strategy_keeps_its_bits(name: str, precision: str) -> None:
    stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
    runs = [tiny(f"strategy.name={name}", *stages, f"precision={precision}", *more) for more in ((), (AGAIN,))]
    (plain, again), others = run_on(2, each, runs, timeout_s=280)
    assert again["digest"] == plain["digest"]
    assert [found["loss"] for found in (again, *others)] == [plain["loss"]] * 3


class Drawing(nn.Module):
    """A layer that draws random numbers from Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden) * random.random() + np.random.random())


def test_recomputation_repeats_draws_of_python_and_numpy() -> None:
    found = []
    for more in ((), (AGAIN,)):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList(Drawing() for _ in range(3))})
        blocks.prepare(tiny(*more).model, model)
        random.seed(0)
        np.random.seed(0)
        hidden = torch.ones(4, 8)
        for layer in model["layers"]:  # type: ignore[attr-defined]
            hidden = layer(hidden)
        hidden.sum().backward()
        found.append([*(p.grad for p in model.parameters()), torch.tensor([random.random(), np.random.random()])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def most_memory(*overrides: str) -> int:
    """Return the peak bytes that forward and backward of 8 layers write to, on 2 texts of 512 tokens."""
    config = {"n_layer": 8, "n_head": 4, "n_embd": 32, "n_positions": 512, "vocab_size": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config, **ends), attn_implementation="sdpa")
    blocks.prepare(tiny(*overrides).model, model)
    with Written() as written:
        model(input_ids=torch.ones(2, 512, dtype=torch.int64)).logits.sum().backward()
    return written.most


def test_recomputed_activations_are_freed() -> None:
    """With 8 layers recomputed one at a time, memory holds one layer's activations and each layer's inputs."""
    plain, again = most_memory(), most_memory(AGAIN)
    assert again < 0.3 * plain, f"{again:,} of {plain:,} bytes"


def test_a_resume_may_switch_recomputation() -> None:
    assert arithmetic_of(tiny(AGAIN, "model.offload_activations=true")) == arithmetic_of(tiny())


# -- activation offloading to the host, tested without a GPU --------------------------------------------------


def test_offloaded_activations_are_restored_and_weights_stay_on_the_device() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    inputs = torch.randn(128, 256)

    def gradients(hooks: Any) -> list[Tensor]:
        layer.zero_grad()
        with hooks:
            loss = layer(inputs).square().sum()
        loss.backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    moved: list[torch.Size] = []
    hooks = blocks.OnHost(weights, device="cpu")
    pack = hooks.pack_hook

    def watched(tensor: Tensor) -> Any:
        packed = pack(tensor)
        moved.extend([tensor.shape] if packed[0] is not None else [])
        return packed

    hooks.pack_hook = watched
    found = gradients(hooks)
    assert moved
    assert set(moved) == {torch.Size([128, 256])}  # inputs and outputs of layers; no weight
    for one, other in zip(found, gradients(blocks.OnHost(set(), device="nowhere")), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("more", [(), (AGAIN,)])
def test_on_a_gpu_the_bits_are_the_same_and_memory_is_less(more: tuple[str, ...]) -> None:
    found = []
    torch.use_deterministic_algorithms(True)
    for keys in (more, (*more, "model.offload_activations=true")):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "gpt2", n_layer=48, n_head=8, n_embd=256, n_positions=32, vocab_size=64, use_cache=False
        )
        model = AutoModelForCausalLM.from_config(config).cuda()
        blocks.prepare(tiny("launch.device=cuda", *keys).model, model)
        gc.collect()  # so that memory that another test left is not freed during the measurement
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(1)
        model(input_ids=torch.ones(256, 32, dtype=torch.int64, device="cuda")).logits.sum().backward()
        found.append((torch.cuda.max_memory_allocated() - before, [p.grad.cpu() for p in model.parameters()]))
    torch.use_deterministic_algorithms(False)
    (plain, gradients), (moved, others) = found
    assert moved < 0.8 * plain
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.offload_activations=true",), ("LS4041",)),
        (
            (AGAIN, "strategy.name=hf_trainer", "strategy.options.gradient_checkpointing=true"),
            ("LS4040", "model.checkpoint_activations", "strategy.options.gradient_checkpointing"),
        ),
        ((AGAIN, "model.type=reformer", "model.config={}"), ("LS4042", "model.checkpoint_activations")),
        ((AGAIN, "model.type=squeezebert", "model.config={}"), ("LS4042", "model.checkpoint_activations")),
        ((AGAIN, "model.type=mpnet", "model.config={}"), ("LS4043",)),
    ],
)
def test_unsupported_activation_keys_are_refused(overrides: tuple[str, ...], said: tuple[str, ...]) -> None:
    with raises(*said) as caught:
        blocks.check(Job.of(tiny(*overrides)), here=True)
    assert "\n" not in str(caught.value)


def test_running_statistics_are_refused() -> None:
    model = nn.Sequential(nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)))
    with raises("LS4044"):
        blocks.prepare(tiny(AGAIN).model, model)


def test_unsupported_request_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "launch.processes=1", "launch.device=cpu", "model.offload_activations=true"]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "LS4041")
    assert len(said.splitlines()) == 1
