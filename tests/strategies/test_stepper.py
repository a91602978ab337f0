"""Parameter groups, layer-wise rates, freezing, and each optimizer against the library or paper that defines it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from lockstep.checkpoint.manifest import code_of
from lockstep.config.run import Run, RunError, load
from lockstep.config.schedules import learning_rate
from lockstep.config.sections import OptimSection
from lockstep.data.job import Job
from lockstep.plain import train as plain
from lockstep.strategies.exact import stepper, training_state
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, rule
from lockstep.training.resolve import check_names, resolve_strategy
from support.contributed import example
from support.harness import TINY
from support.messages import raises

BERT = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)


def run_of(*words: str) -> Run:
    return load(None, list(words), TINY)


@pytest.fixture(scope="module")
def bert() -> torch.nn.Module:
    return BertForSequenceClassification(BERT)


def test_biases_and_norms_are_not_decayed(bert: torch.nn.Module) -> None:
    exempt = stepper.without_decay(bert)
    assert {n for n, _ in bert.named_parameters() if "LayerNorm" in n or n.endswith("bias")} == exempt
    decayed, free = stepper.build(OptimSection(weight_decay=0.1), bert).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(list(bert.parameters()))
    assert all(p.ndim == 1 for p in free["params"])
    assert all(p.ndim == 2 for p in decayed["params"])


def test_the_first_group_that_matches_holds(bert: torch.nn.Module) -> None:
    section = run_of(
        "optim.learning_rate=1e-3",
        "optim.groups=[{match: 'classifier.*', learning_rate: 2e-3, weight_decay: 0.5}, {match: '*', weight_decay: 0}]",
    ).optim
    found = stepper.assigned(section, bert)
    assert found["classifier.weight"] == stepper.ParamGroupSpec(2.0, 0.5, "")
    assert found["classifier.bias"] == stepper.ParamGroupSpec(2.0, 0.0, "")
    assert found["bert.pooler.dense.weight"] == stepper.ParamGroupSpec(1.0, 0.0, "")
    optimizer = stepper.build(section, bert)
    stepper.set_rate(optimizer, 0.25)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert (rates["classifier.weight"], rates["bert.pooler.dense.weight"]) == (0.5, 0.25)


def test_layerwise_rates_decrease_towards_the_embedding(bert: torch.nn.Module) -> None:
    found = {n: how.scale for n, how in stepper.assigned(OptimSection(layerwise_lr_decay=0.5), bert).items()}
    assert found["classifier.weight"] == found["bert.pooler.dense.bias"] == 1.0
    assert found["bert.encoder.layer.1.output.dense.weight"] == 0.5
    assert found["bert.encoder.layer.0.output.dense.weight"] == 0.25
    assert found["bert.embeddings.word_embeddings.weight"] == found["bert.embeddings.LayerNorm.bias"] == 0.125
    gpt2 = GPT2ForSequenceClassification(GPT2Config(n_embd=8, n_layer=3, n_head=1, vocab_size=16))
    found = {n: how.scale for n, how in stepper.assigned(OptimSection(layerwise_lr_decay=0.5), gpt2).items()}
    assert found["transformer.wpe.weight"] == 1 / 16
    assert [found[f"transformer.h.{i}.ln_1.weight"] for i in range(3)] == [1 / 8, 1 / 4, 1 / 2]
    assert found["transformer.ln_f.weight"] == found["score.weight"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.groups=[{match: 'clasifier.*'}]"], "optim.groups: no trainable weight is called 'clasifier"),
        (["optim.groups=[{match: '*'}, {match: 'bert.*'}]"], "all weights of 'bert.*' are in an earlier group"),
        (
            ["model.freeze=['layer.0.*']"],
            "model.freeze: no trainable weight is called 'layer.0.*'; examples of trainable weights: bert",
        ),
        (["model.freeze=['*']"], "model.freeze: every weight is frozen, so nothing is left to train; freeze fewer"),
        (["model.freeze=['bert.*']", "optim.groups=[{match: 'bert.pooler.*'}]"], "optim.groups: no trainable weight"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(words: list[str], said: str) -> None:
    run = run_of(*words)
    with pytest.raises(RunError) as caught:
        stepper.assigned(run.optim, training_state.freeze(run.model, BertForSequenceClassification(BERT)))
    assert said in str(caught.value)


def test_layerwise_decay_of_a_model_without_layers_is_refused() -> None:
    with raises("LS4171"):
        stepper.assigned(OptimSection(layerwise_lr_decay=0.5), torch.nn.Linear(2, 2))


def test_frozen_weights_are_in_no_group() -> None:
    run = run_of("model.freeze=['bert.embeddings.*', '*.layer.0.*']")
    model = training_state.freeze(run.model, BertForSequenceClassification(BERT))
    names = {name for group in stepper.build(run.optim, model).param_groups for name in group["names"]}
    assert names == {n for n, _ in model.named_parameters() if "embeddings" not in n and "layer.0" not in n}


def test_muon_takes_the_matrices_of_the_layers(bert: torch.nn.Module) -> None:
    found = {n for n, how in stepper.assigned(run_of("optim=muon").optim, bert).items() if how.kind == "matrix"}
    assert found == {n for n, p in bert.named_parameters() if ".layer." in n and p.ndim == 2}
    section = run_of("optim=muon", "optim.muon_params=['*.query.weight', '*.bias']").optim
    found = {n for n, how in stepper.assigned(section, bert).items() if how.kind == "matrix"}
    assert found == {f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(2)}


def test_a_head_that_is_a_sequential_is_no_layer() -> None:
    section = run_of("optim=muon", "optim.layerwise_lr_decay=0.5").optim
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]))
    head = stepper.assigned(section, resnet)["classifier.1.weight"]
    assert (head.kind, head.scale) == ("", 1.0)
    optimizers = plain.optimizers_of(
        {"optim": section.model_dump() | section.options | {"layerwise_lr_decay": 1.0}},
        resnet,
        {"classifier.1.weight": resnet.classifier[1].weight},
        {},
    )
    assert [type(each) for each in optimizers] == [torch.optim.AdamW]


@pytest.mark.parametrize(
    ("code", "key", "more"),
    [
        ("LS4225", "optim.muon_params", "optim.muon_params=['*.c_fc.weight', '*.nothing.weight']"),
        ("LS4226", "optim.name", "model.freeze=['*.h.*']"),
    ],
)
def test_muon_without_a_matrix_is_refused(code: str, key: str, more: str) -> None:
    with raises(code, key):
        check_names(Job.of(run_of("optim=muon", more), 1).with_data())


# -- the update itself -----------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Record the kernels that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def pair(name: str, *words: str, shape: tuple[int, ...] = (6, 11)) -> tuple[stepper.Stepper, Any, Any]:
    """Return a lockstep stepper, its weight, and a copy of that weight for the reference optimizer."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    section = run_of(f"optim={name}", "optim.weight_decay=0.1", *words).optim
    model = torch.nn.Sequential()
    model.register_parameter("w", weight)
    return stepper.build(section, model), weight, torch.nn.Parameter(weight.detach().clone())


def stepped(ours: stepper.Stepper, weight: Any, theirs: torch.optim.Optimizer, other: Any, rates: list[float]) -> None:
    """Step both optimizers with the same gradients and rates."""
    for step, rate in enumerate(rates):
        torch.manual_seed(step + 1)
        weight.grad, other.grad = (torch.randn(weight.shape),) * 2
        other.grad = other.grad.clone()
        stepper.set_rate(ours, rate)
        theirs.param_groups[0]["lr"] = rate
        ours.step()
        theirs.step()


RATES = [0.0, 1e-2, 2e-2, 1e-2, 5e-3]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_adamw_and_sgd_are_torch_s_fused_ones(name: str) -> None:
    ours, weight, other = pair(name, shape=(8, 16))
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW([other], betas=(0.9, 0.999), weight_decay=0.1, fused=True),
        "sgd": torch.optim.SGD([other], momentum=0.9, weight_decay=0.1, fused=True),
    }
    with Seen() as seen:
        stepped(ours, weight, kinds[name], other, RATES)
    assert torch.equal(weight, other)
    assert f"_fused_{name}_" in seen.names


@pytest.mark.parametrize("shape", [(6, 11), (11,), (2, 3, 5)])
def test_adafactor_is_torch_s(shape: tuple[int, ...]) -> None:
    ours, weight, other = pair("adafactor", shape=shape)
    stepped(ours, weight, torch.optim.Adafactor([other], weight_decay=0.1), other, RATES)
    assert torch.equal(weight, other)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_torch_s(adjust: Any) -> None:
    ours, weight, other = pair("muon", f"optim.lr_adjust={adjust}", "optim.muon_params=['*']", shape=(16, 8))
    theirs = torch.optim.Muon([other], weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust)
    stepped(ours, weight, theirs, other, RATES)
    assert torch.equal(weight, other)


def test_muon_updates_other_weights_by_adamw() -> None:
    ours, weight, other = pair("muon", shape=(16,))
    theirs = torch.optim.AdamW([other], betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    stepped(ours, weight, theirs, other, RATES)
    assert torch.equal(weight, other)


def test_lion_matches_the_paper() -> None:
    ours, weight, other = pair("lion")
    mean = torch.zeros_like(other).double()
    expected = other.detach().double()
    for step, rate in enumerate(RATES):  # algorithm 2, in float64
        torch.manual_seed(step + 1)
        weight.grad = torch.randn(weight.shape)
        gradient = weight.grad.double()
        stepper.set_rate(ours, rate)
        ours.step()
        expected = expected - rate * ((0.9 * mean + 0.1 * gradient).sign() + 0.1 * expected)
        mean = 0.99 * mean + 0.01 * gradient
    assert torch.allclose(weight.double(), expected, atol=1e-6)


def test_schedule_free_matches_the_paper() -> None:
    """Compare with the paper's AdamW in float64: average x, base sequence z, and y between them, where gradients are
    computed; a step's weight in the average is the square of the highest rate so far."""
    ours, weight, other = pair("schedule_free", "optim.schedule=constant", "optim.betas=[0.8, 0.9]")
    x = z = y = other.detach().double()
    square, total, highest = torch.zeros_like(z), 0.0, 0.0
    for step, rate in enumerate([*RATES, 3e-2]):
        torch.manual_seed(step + 1)
        weight.grad = torch.randn(weight.shape)
        gradient = weight.grad.double()
        stepper.set_rate(ours, rate)
        ours.step()
        square = 0.9 * square + 0.1 * gradient.square()
        change = gradient / ((square / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8) + 0.1 * y
        z = z - rate * change
        highest = max(highest, rate)
        total += highest**2
        share = highest**2 / total if total else 0.0
        x = (1 - share) * x + share * z
        y = 0.2 * z + 0.8 * x
        assert torch.allclose(weight.double(), y, atol=1e-6), step
        evaluated = ours.rule.evaluated(weight.detach(), ours.state[weight])
        assert torch.allclose(evaluated.double(), x, atol=1e-6), step


@pytest.mark.extras
def test_schedule_free_matches_its_library() -> None:
    library = pytest.importorskip("schedulefree")
    ours, weight, other = pair("schedule_free")
    theirs = library.AdamWScheduleFree([other], weight_decay=0.1, foreach=False)
    theirs.train()
    stepped(ours, weight, theirs, other, RATES)
    assert torch.allclose(weight, other, atol=1e-6)
    theirs.eval()
    trained = weight.detach().clone()
    with ours.averaged(lambda: None) as averages:
        assert averages
        assert torch.allclose(weight, other, atol=1e-6)
        assert not torch.equal(weight, trained)
    assert torch.equal(weight, trained)


@pytest.mark.extras
@pytest.mark.parametrize("warmup", [0, 1, 3, 5])
def test_the_warmup_of_schedule_free_matches_its_library(warmup: int) -> None:
    """The library applies warmup itself, at a constant rate. Control: other optimizers' warmup begins at 0."""
    library = pytest.importorskip("schedulefree")
    ours, weight, other = pair("schedule_free")
    theirs = library.AdamWScheduleFree([other], lr=1e-2, weight_decay=0.1, foreach=False, warmup_steps=warmup)
    theirs.train()
    keys: dict[str, Any] = {"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": warmup}
    section, begins_at_0 = OptimSection(name="schedule_free", **keys), OptimSection(name="adamw", **keys)
    for step in range(8):
        torch.manual_seed(step + 1)
        weight.grad = torch.randn(weight.shape)
        other.grad = weight.grad.clone()
        stepper.set_rate(ours, learning_rate(section, step, 8))
        ours.step()
        theirs.step()
        assert theirs.param_groups[0]["scheduled_lr"] == pytest.approx(ours.param_groups[0]["lr"], rel=1e-12)
        assert (learning_rate(begins_at_0, step, 8) == ours.param_groups[0]["lr"]) == (step >= warmup)
        assert torch.allclose(weight, other, atol=1e-6)


def test_schedule_free_exports_the_mean_of_its_iterates() -> None:
    """At a constant rate the export is the unweighted mean of all z, computed here without the library."""
    ours, weight, _ = pair("schedule_free", "optim.weight_decay=0")
    total = torch.zeros(weight.shape, dtype=torch.float64)
    for step in range(5):
        torch.manual_seed(step)
        weight.grad = torch.randn(weight.shape)
        stepper.set_rate(ours, 1e-2)
        ours.step()
        total += ours.state[weight]["z"].double()
    with ours.averaged(lambda: None):
        assert torch.allclose(weight.double(), total / 5, atol=1e-6)


@pytest.mark.extras
def test_adamw_8bit_stays_near_adamw() -> None:
    pytest.importorskip("bitsandbytes")
    ours, weight, other = pair("adamw_8bit", shape=(64, 80))
    theirs = torch.optim.AdamW([other], betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    before = weight.detach().clone()
    stepped(ours, weight, theirs, other, RATES)
    assert ours.state[weight]["exp_avg"].dtype == torch.uint8
    moved, apart = (other - before).norm(), (weight - other).norm()
    assert 0 < apart < 0.1 * moved
    small = pair("adamw_8bit")
    small[1].grad = torch.ones_like(small[1])
    small[0].step()
    assert small[0].state[small[1]]["exp_avg"].dtype == torch.float32


@pytest.mark.extras
@pytest.mark.parametrize(("least", "as_trainer", "wanted"), [(10**9, False, 1e-5), (4096, True, 1e-4), (0, True, 1e-4)])
def test_adamw_8bit_matches_bitsandbytes(least: int, as_trainer: bool, wanted: float) -> None:
    """Updates of 8 steps with the same gradients match `AdamW8bit` on a CPU: with all moments in 32 bits, and with
    those of embeddings in 32 bits, as in Trainer. Control: without that override bitsandbytes quantizes those of
    embeddings."""
    apart, in_embedding = beside_bitsandbytes(least, as_trainer)
    assert apart < wanted
    if as_trainer:
        apart, in_embedding = beside_bitsandbytes(least, False)
        assert apart > 10 * wanted
        assert in_embedding > 0.999 * apart


def beside_bitsandbytes(least: int, as_trainer: bool) -> tuple[float, float]:
    """Return the relative difference between the 8-step updates of lockstep and bitsandbytes, and the embedding's share
    of it."""
    library = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Sequential(torch.nn.Embedding(400, 64), torch.nn.Linear(64, 96)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    start = {name: p.detach().clone() for name, p in ours.named_parameters()}
    # the manager is global and outlives its models
    (manager := library.optim.GlobalOptimManager.get_instance()).initialize()
    if as_trainer:
        manager.register_module_override(theirs[0], "weight", {"optim_bits": 32})
    section = OptimSection(name="adamw_8bit", learning_rate=1e-3, weight_decay=0.0, min_8bit_size=least)
    optimizer = stepper.build(section, ours)
    other = library.optim.AdamW8bit(theirs.parameters(), lr=1e-3, weight_decay=0.0, min_8bit_size=least)
    for step in range(8):
        torch.manual_seed(step)
        ids = torch.randint(0, 400, (8, 8))
        ours.zero_grad()
        ours(ids).sin().square().mean().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        stepper.set_rate(optimizer, 1e-3)
        optimizer.step()
        other.step()
    manager.initialize()
    squares = [float((p - q).square().sum()) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    change = sum(float((p - start[name]).square().sum()) for name, p in ours.named_parameters()) ** 0.5
    return sum(squares) ** 0.5 / change, squares[0] ** 0.5 / change


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "schedule_free"])
def test_an_element_has_the_same_bits_in_any_slice(name: str) -> None:
    """This holds for update rules that support any slice. Control: torch's kernel on bare slices gives other bits."""
    torch.manual_seed(0)
    whole = torch.randn(1003)
    slopes = [torch.randn(1003) * 10.0**-i for i in range(6)]

    def trained(cuts: list[int]) -> torch.Tensor:
        parts = [torch.nn.Parameter(part.clone()) for part in whole.split(cuts)]
        section = run_of(f"optim={name}", "optim.weight_decay=0.1").optim
        group = {"params": parts, "names": [str(i) for i in range(len(parts))], "lr": 0.0, "scale": 1.0, "kind": ""}
        optimizer = stepper.Stepper(section, [group | {"weight_decay": 0.1}])
        for gradient in slopes:
            for p, g in zip(parts, gradient.split(cuts), strict=True):
                p.grad = g.clone()
            stepper.set_rate(optimizer, 1e-2)
            optimizer.step()
        return torch.cat([p.detach() for p in parts])

    assert rule(run_of(f"optim={name}").optim).any_part
    for cuts in ([501, 502], [7, 996], [15] * 66 + [13]):
        assert torch.equal(trained(cuts), trained([1003]))


def test_the_control_a_bare_kernel_depends_on_the_slice() -> None:
    torch.manual_seed(0)
    whole, gradient = torch.randn(1003), torch.randn(1003)

    def trained(cuts: list[int]) -> torch.Tensor:
        parts = [torch.nn.Parameter(part.clone()) for part in whole.split(cuts)]
        optimizer = torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.1, fused=True)
        for i in range(6):
            for p, g in zip(parts, gradient.split(cuts), strict=True):
                p.grad = g * 10.0**-i
            optimizer.step()
        return torch.cat([p.detach() for p in parts])

    assert not torch.equal(trained([15] * 66 + [13]), trained([1003]))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim=muon", "strategy=zero2"], "optim.name: muon updates whole tensors, but under zero2 DeepSpeed holds"),
        (["optim=adafactor", "strategy=zero3"], "strategy.name=fsdp2, or optim.name=adamw, lion or sgd"),
        (
            ["optim=muon", "strategy=hf_accelerate", "strategy.options={deepspeed: {zero_stage: 2}}"],
            "optim.name: muon updates whole tensors",
        ),
        (["optim=schedule_free", "strategy=zero1"], "optim.name: schedule_free exports averaged weights"),
        (["optim=schedule_free", "optim.schedule=linear"], "optim.schedule: schedule_free uses an average instead"),
        (
            ["optim=muon", "strategy=fsdp2", "strategy.options={cpu_offload: true}", "launch.device=auto"],
            "strategy.options.cpu_offload: muon updates whole tensors",
        ),
        (
            [
                "optim=muon",
                "strategy=hf_accelerate",
                "strategy.options={fsdp: {cpu_offload: true}}",
                "launch.device=auto",
            ],
            "strategy.options.fsdp.cpu_offload: muon updates whole tensors",
        ),
    ],
)
def test_parameters_that_an_optimizer_does_not_support_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RunError) as caught:
        resolve_strategy(run_of(*words), 2)
    assert said in str(caught.value)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("LS1120", "adamw_8bit", "bitsandbytes", "pip install 'lockstep-train[quantization]'"):
        resolve_strategy(run_of("optim=adamw_8bit", "strategy=single"), 1)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim=adamm", "optim.name: unknown optimizer 'adamm'; did you mean 'adamw'?"),
        (
            "optim=torch.optim.NAdam",
            "optim.name: torch.optim.NAdam is an optimizer of torch, not of lockstep; how-to/plug-ins/optimizer",
        ),
        ("optim.momentum=0.8", "unknown key 'optim.momentum': it is a key of runs with optim.name: muon, sgd"),
        (
            "optim.groups=[{match: x, lr: 3}]",
            "optim.groups: group 1: unknown key 'lr'; known are match, learning_rate",
        ),
        ("optim.groups=[{learning_rate: 3}]", "optim.groups: group 1: match is missing"),
        (
            "optim.groups=[{match: a, learning_rate: -1}]",
            "group 1: learning_rate: invalid value -1; expected greater than 0",
        ),
        ("optim.groups=5", "optim.groups: expected a list of groups, such as [{match: 'classifier.*'"),
    ],
)
def test_bad_keys_are_named(word: str, said: str) -> None:
    with pytest.raises(RunError) as caught:
        run_of(word)
    assert said in str(caught.value)


def test_the_optimizer_of_contributing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's module, it has typed keys, a complete state, and its source is compared at a resume."""
    (tmp_path / "my_nadam.py").write_text(example("strategies/optimizers/nadam.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with raises("LS1000", "'optim.momentum_dekay'", "'momentum_decay'"):
        run_of("optim=my_nadam.NAdam", "optim.momentum_dekay=1")
    ours, weight, other = pair("my_nadam.NAdam", "optim.momentum_decay=0.01")
    theirs = torch.optim.NAdam([other], weight_decay=0.1, momentum_decay=0.01, decoupled_weight_decay=True)
    begun = set(ours.saved())
    stepped(ours, weight, theirs, other, RATES)
    assert torch.equal(weight, other)
    assert begun == set(ours.saved()) == {f"optimizer.{k}.w" for k in ("step", "mu_product", "exp_avg", "exp_avg_sq")}
    run = run_of("optim=my_nadam.NAdam")
    assert "my_nadam.py" in code_of(run.task, run.optim, run.strategy)


class Momentum(Optimizer):
    """Momentum SGD: correct, or with one of the two mistakes below."""

    any_part = True

    def begin(self, group: GroupOf, like: torch.Tensor) -> State:
        return {"sum": torch.zeros_like(like)}

    def update(
        self,
        group: GroupOf,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            weight.sub_(state["sum"].add_(gradient).mul(group["lr"]))


class OtherKey(Momentum):
    def begin(self, group: GroupOf, like: torch.Tensor) -> State:
        return {"total": torch.zeros_like(like)}


class Replaces(Momentum):
    def update(self, group: GroupOf, weights: Any, gradients: Any, states: Sequence[State]) -> None:
        for state, gradient in zip(states, gradients, strict=True):
            state["sum"] = state["sum"] + gradient


def test_an_optimizer_whose_state_is_wrong_is_refused() -> None:
    resolve_strategy(run_of("strategy.name=single", f"optim.name={__name__}.Momentum"), 1)
    with raises("LS4222", "OtherKey", "'sum'"):
        resolve_strategy(run_of("strategy.name=single", f"optim.name={__name__}.OtherKey"), 1)
    with raises("LS4223", "Replaces", "'sum'"):
        resolve_strategy(run_of("strategy.name=single", f"optim.name={__name__}.Replaces"), 1)
