"""QLoRA: an adapter beside a base in 4 bits. The same bits on any number of processes; what layers compute is what
float32 weights of the same values would compute; exports are what was trained."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.models import quantized, storage_dtype
from lockstep.tasks.models.storage_dtype import counts
from lockstep.tasks.task import make_task
from lockstep.training import model_stats
from lockstep.training.resolve import resolve_strategy
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.messages import raises
from support.predictions import numbers
from support.task_runs import make

WIDE = {
    "documents": ["model.config.n_embd=64"],
    "token_classification": ["model.config.hidden_size=64", "model.config.intermediate_size=128"],
}
TARGETS = {"documents": ["c_attn"], "token_classification": ["query", "value"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of both kinds of linear layers, to train an adapter on."""
    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("quantized")
    for kind in TARGETS:
        run = make(folder, kind, *WIDE[kind])
        task = make_task(Job.of(run).with_data())
        task.model().save_pretrained(folder / f"{kind}-model")
        task.tokenizer.save_pretrained(folder / f"{kind}-model")
    return folder


def run_of(folder: Path, kind: str, *overrides: str) -> Run:
    adapter = {"type": "lora", "r": 4, "lora_dropout": 0.1, "target_modules": TARGETS[kind]}
    model = {"source": str(folder / f"{kind}-model"), "adapter": adapter, "quantization": "nf4"}
    return make(folder, kind, f"model={json.dumps(model)}", "tokenizer={}", *overrides)


def trained(world: World, run: Run) -> dict[str, Any]:
    """Two steps, and two more: as they are, and gone on with by another strategy from the state between them."""
    _, strategy, feed = build_with_feed(run, world)
    results = [strategy.train_step(feed.make(t), 1e-2) for t in range(2)]
    between = world.broadcast({k: v.clone() for k, v in strategy.state.state_dict().items()})
    other = build(run, world)[1]
    other.state.load_state_dict(between)
    ends = []
    for each in (strategy, other):
        results += [each.train_step(feed.make(t), 1e-2) for t in range(2, 4)]
        state = each.state.state_dict()
        ends.append(digest(state) if world.is_main else "")
    dtypes = {n: t.dtype for n, t in between.items() if n.startswith("model.")}
    found = {"ends": ends, "loss": [float(r.loss) for r in results], "norm": [float(r.grad_norm) for r in results]}
    return found | {
        "dtypes": dtypes,
        "count": strategy.weights.parameter_count,
        "packed": storage_dtype.count(strategy.model),
    }


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: run_on(1, trained, run_of(folder, kind))[0] for kind in TARGETS}


@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.parametrize("kind", TARGETS)
def test_layer_matrices_are_stored_in_4_bits(kind: str, alone: dict, folder: Path) -> None:
    found = alone[kind]
    low = {name for name, dtype in found["dtypes"].items() if dtype == torch.uint8}
    assert low
    assert all(name.endswith(".packed") and ".0." in name.replace(".1.", ".0.") for name in low)
    assert not any(part in name for name in low for part in ("lora_", "lm_head", "classifier", "wte", "embeddings"))
    assert found["ends"][0] == found["ends"][1]  # gone on with from its state
    plain = run_of(folder, kind, "model.quantization=null")
    assert found["count"] == run_on(1, count_of, plain)[0]
    assert found["packed"] == 2 * 12 * 64 * 64 if kind == "documents" else found["packed"] > 0


def count_of(world: World, run: Run) -> int:
    return build(run, world)[1].weights.parameter_count


@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("allreduce", 2, ()),
        ("ddp", 2, ()),
        ("ddp", 3, ()),
        ("ddp", 2, ("model.checkpoint_activations=true",)),
        ("hf_accelerate", 2, ()),
        ("hf_trainer", 2, ()),
        ("fsdp2", 2, ("strategy.options.gather=step",)),
        ("zero1", 2, ()),
        ("zero2", 2, ()),
    ],
)
def test_the_same_bits_under_every_strategy(
    kind: str, name: str, ranks: int, more: tuple[str, ...], folder: Path, alone: dict
) -> None:
    run = run_of(folder, kind, f"strategy.name={name}", *more)
    found = run_on(ranks, trained, run)[0]
    assert {k: found[k] for k in ("loss", "norm", "ends")} == {k: alone[kind][k] for k in ("loss", "norm", "ends")}


class Layers(torch.nn.Module):
    """Blocks of each kind of linear layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 128), Conv1D(64, 128), torch.nn.Linear(64, 7)])
        self.head = torch.nn.Linear(7, 64)
        for parameter in self.parameters():
            parameter.data = torch.randn_like(parameter)
            parameter.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * self.scale
        for block in self.blocks:
            hidden = torch.tanh(block(hidden) / 8)
        return self.head(hidden)


def ends(model: Layers, low: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    model.scale.grad = None
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        output = model(torch.linspace(-1, 1, 3 * 5 * 64).view(3, 5, 64))
    output.float().square().sum().backward()
    return output.detach(), model.scale.grad


@pytest.mark.extras
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
def test_layers_compute_with_dequantized_4_bit_values(kind: str, low: torch.dtype | None) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    whole = Layers()
    run = tiny(model={"source": "somewhere", "adapter": {"r": 4}, "dtype": "float32", "quantization": kind})
    model = storage_dtype.cast_weights(run.model, Layers())
    assert [hasattr(m, "packed") for m in (*model.blocks, model.head)] == [True, True, True, False]
    assert storage_dtype.count(model) == 2 * 64 * 128 + 64 * 7
    assert storage_dtype.parameters(model) == sum(p.numel() for p in whole.parameters())
    output, gradient = ends(model, low)
    quantized.unpack(model)
    assert not storage_dtype.count(model)
    for block, other in zip(model.blocks, whole.blocks, strict=True):
        levels = (block.weight.t().contiguous() if isinstance(block, Conv1D) else block.weight).view(-1, 64)
        assert max(len(row.unique()) for row in levels) <= 16
        assert block.weight.shape == other.weight.shape
        assert 0 < (block.weight - other.weight).norm() / other.weight.norm() < 0.15
    wanted = ends(model, low)
    precise = 1e-5 if low is None else 2e-2
    torch.testing.assert_close(output, wanted[0], rtol=precise, atol=precise)
    torch.testing.assert_close(gradient, wanted[1], rtol=precise, atol=precise * float(gradient.abs().max()))
    assert (
        wanted[0].float() - ends(whole, low)[0].float()
    ).abs().max() > 0.1  # the control: what they were packed from


@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_exports_are_what_was_trained(
    export: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(
        folder,
        "token_classification",
        "launch.processes=1",
        "strategy.name=single",
        f"model.adapter.export={export}",
        f"output={tmp_path / 'out'}",
    )
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    said = capfd.readouterr()
    assert "nf4" in said.out
    assert "kernels" not in said.err + said.out
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    for where in ("", "/checkpoints/latest"):
        assert main(["evaluate", f"{tmp_path / 'out'}{where}"]) == 0
        assert numbers(capfd.readouterr().out)["loss"][0] == pytest.approx(last["loss"], rel=1e-4)
    assert main(["predict", str(tmp_path / "out"), "the dog runs"]) == 0


@pytest.mark.extras
def test_plan_counts_half_a_byte_and_the_scales(folder: Path) -> None:
    run = run_of(folder, "documents")
    task = make_task(Job.of(run).with_data())
    empty, full = task.model(empty=True), task.model()
    assert counts(empty) == counts(full)
    packed = storage_dtype.count(empty)
    assert packed == storage_dtype.count(full) == 2 * 12 * 64 * 64
    held = sum(t.nbytes for n, t in full.named_parameters() if n.endswith((".packed", ".absmax")))
    assert held == packed * quantized.BYTES
    said = model_stats.memory(Job.of(run, 1), 8_000_000_000, 10_000_000, 7_000_000_000)
    assert "weights 6.0 GB" in said  # 7 G x 0.5625 + 0.99 G x 2 + 10 M x 4


MODEL = {"source": "somewhere", "adapter": {"r": 4}, "quantization": "nf4"}
REFUSED = [
    (["model.adapter={}"], "LS3170", "model.adapter"),
    (["model.adapter.type=ia3"], "LS3172", "ia3"),
    (["model.adapter.use_dora=true"], "LS3172", "use_dora"),
    (["model.compile=true"], "LS3174", "model.compile=false"),
    *((["strategy.name=" + n], "LS3173", n) for n in ("fsdp2", "zero3", "pipeline")),
    (["strategy.name=fsdp2", "strategy.options.gather=micro_batch"], "LS3173", "fsdp2"),
]


def _library(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Pretend that bitsandbytes is installed, or is not; leave other packages as they are."""
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return (name if there else None) if name == "bitsandbytes" else found(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)


@pytest.mark.parametrize(("overrides", "code", "value"), REFUSED)
def test_options_incompatible_with_quantization_are_refused(
    overrides: list[str], code: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _library(monkeypatch, there=True)
    with raises(code, value) as caught:
        resolve_strategy(tiny(*overrides, model=MODEL), 2)
    assert "\n" not in str(caught.value)


def test_missing_library_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, there=False)
    with raises("LS3171"):
        resolve_strategy(tiny(model=MODEL), 1)


def test_unknown_quantization_is_refused() -> None:
    with raises("LS1002", "model.quantization"):
        tiny(model=MODEL | {"quantization": "int3"})


def test_a_model_without_such_layers_is_refused() -> None:
    narrow = torch.nn.ModuleList([torch.nn.Linear(16, 16).requires_grad_(False)])
    with raises("LS3175"):
        storage_dtype.cast_weights(tiny(model=MODEL).model, narrow)
