"""DeepSpeed ZeRO with exact sums has the bits of `single`, and with its own reduction matches within rounding; its
state can be loaded by other strategies and numbers of processes; options that DeepSpeed would ignore get a message."""

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job
from lockstep.data.job import strategy_class as class_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import layers
from lockstep.strategies.engines.zero import Zero
from lockstep.strategies.engines.zero_partition import own_activations
from lockstep.strategies.observer import GradientRecorder
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import long, slow
from support.messages import raises

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

STAGES = [1, 2, 3]
OWN = "strategy.exact=false"  # DeepSpeed's own reduction
SGD = ("optim.name=sgd", "optim.learning_rate=0.1")
BF16_WEIGHTS = ("precision=bf16", "strategy.options={bf16: {enabled: true}}")


def trained(world: World, run: Run, steps: int = 4) -> dict[str, Any]:
    """Train a few steps with evaluations in between; return everything that must be equal."""
    task, strategy, feed = build_with_feed(run, world)
    gradients: list[dict[str, torch.Tensor]] = []
    strategy.observer = recorder = GradientRecorder(world)
    results, scores = [], []
    for t in range(steps):
        results.append(strategy.train_step(feed.make(t), learning_rate(run.optim, t, steps)))
        gradients.append(recorder.gradients)
        if t in (1, steps - 1):
            scores.append(evaluate(world, task, strategy, task.splits["validation"])["loss"])
    export = strategy.state.export()
    found = {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "scores": scores,
        "state": {k: v.clone() for k, v in strategy.state.state_dict().items()},
        "export": export and {k: v.clone() for k, v in export.items()},
        "gradients": gradients,
        "parameters": strategy.weights.parameter_count,
        "engine": strategy.engine._config.zero_config.model_dump(by_alias=True, mode="json")
        if run.strategy.name.startswith("zero")
        else {},
        "clear": all(p.grad is None for p in strategy.model.parameters()),
    }
    strategy.close()
    return found


def strategy_class(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    """Return rank 0's report; check that all ranks report the same, and that only rank 0 has the full export. The third
    of four steps is the short one at the end of an epoch."""
    run = tiny("data.limit=56", f"strategy.name={name}", *overrides)
    first, *others = run_on(ranks, trained, run)
    for other in others:
        assert {k: other[k] for k in ("loss", "norm", "scores")} == {k: first[k] for k in ("loss", "norm", "scores")}
        assert other["export"] is None
        assert all(torch.equal(tensor, first["state"][k]) for k, tensor in other["state"].items())
    assert first["clear"]
    return first


@cache
def alone(*overrides: str) -> dict[str, Any]:
    return strategy_class("single", 1, *overrides)


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return alone(*SGD)


@pytest.fixture(scope="module")
def single_bf16() -> dict[str, Any]:
    return alone("precision=bf16", *SGD)


@pytest.fixture(scope="module")
def single_adamw() -> dict[str, Any]:
    return alone()


def assert_equal_to_rounding(found: dict[str, Any], single: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(single["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(single["norm"], rel=2e-6)
    assert found["scores"] == pytest.approx(single["scores"], rel=1e-6)
    assert found["parameters"] == single["parameters"]
    for kind in ("state", "export"):
        assert found[kind].keys() == single[kind].keys()
        for key, tensor in single[kind].items():
            assert found[kind][key].shape == tensor.shape, key
            assert (found[kind][key] - tensor).abs().max() <= 1e-6, key
    for ours, theirs in zip(found["gradients"], single["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all((ours[k] - theirs[k]).abs().max() <= 1e-6 for k in theirs)


def assert_same_bits(found: dict[str, Any], single: dict[str, Any]) -> None:
    for kind in ("loss", "norm", "scores", "parameters"):
        assert found[kind] == single[kind]
    for ours, theirs in [(found[k], single[k]) for k in ("state", "export")]:
        assert digest(ours) == digest(theirs)
    for ours, theirs in zip(found["gradients"], single["gradients"], strict=True):
        assert digest(ours) == digest(theirs)


# 8 micro-batches on 3 ranks: in the last round one rank has none. By hand run one rank, which communicates nothing, and
# three with stages 1 and 2, which give out micro-batches as stage 3 does
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(2, 2), (3, 2), slow(3, 3), long(1, 2), *map(long, STAGES[:2], (3, 3)), *map(long, STAGES, (1, 1, 1))],
)
def test_exact_means_the_gradients_and_moments_of_single_too(
    stage: int, ranks: int, single_adamw: dict[str, Any]
) -> None:
    assert_same_bits(strategy_class(f"zero{stage}", ranks), single_adamw)


@pytest.mark.parametrize("stage", [long(1), long(2), 3])
def test_weights_that_are_not_aligned_keep_the_bits(stage: int) -> None:
    """Every size is odd, so that DeepSpeed places weights at offsets where matrix products would round differently."""
    odd = ("model.config.n_embd=27", "model.config.n_head=3", "batch_size=7", "micro_batches=7")
    assert_same_bits(strategy_class(f"zero{stage}", 2, *odd), alone(*odd))


@pytest.mark.parametrize("stage", [long(2), 3])
def test_layers_that_are_used_several_times_keep_the_bits_in_bf16(stage: int) -> None:
    """The gradients of a weight are added in bf16 if it is cast once, in float32 if it is cast several times."""
    sizes = "{hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 64, embedding_size: 16}"
    albert = ("model.type=albert", f"model.config={sizes}", "tokenizer.train=wordpiece", "precision=bf16")
    assert_same_bits(strategy_class(f"zero{stage}", 2, *albert), alone(*albert))


@pytest.mark.slow
def test_a_weight_read_by_another_module_is_gathered_first() -> None:
    """LayoutLMv3 reads weights of layers that it never calls, and DeepSpeed prefetches those."""
    sizes = (
        "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, coordinate_size: 5, "
    )
    sizes += "shape_size: 6, visual_embed: false, max_position_embeddings: 128}"
    layout = ("model.type=layoutlmv3", f"model.config={sizes}", "tokenizer.train=bpe")
    assert_same_bits(strategy_class("zero3", 2, *layout), alone(*layout))


@pytest.mark.parametrize("ranks", [long(1), 2])
@pytest.mark.parametrize("stage", [1, long(2), 3])
def test_accelerate_with_deepspeed_has_the_bits_of_single(stage: int, ranks: int, single_adamw: dict[str, Any]) -> None:
    options = f"strategy.options={{deepspeed: {{zero_stage: {stage}}}}}"
    assert_same_bits(strategy_class("hf_accelerate", ranks, options), single_adamw)


@pytest.mark.parametrize("stage", [long(1), long(2), slow(3)])
def test_accelerate_with_deepspeed_has_the_bits_of_single_in_bf16(stage: int) -> None:
    """If Accelerate were told about bf16, it would let DeepSpeed convert the weights to bf16."""
    options = f"strategy.options={{deepspeed: {{zero_stage: {stage}}}}}"
    single = alone("precision=bf16")
    assert_same_bits(strategy_class("hf_accelerate", 2, options, "precision=bf16"), single)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ("{}", True),
        ("{zero_optimization: {offload_optimizer: {device: cpu}, reduce_bucket_size: 5000}}", True),
        ("{communication_data_type: fp32}", True),
        ("{communication_data_type: bf16}", False),
        ("{zero_optimization: {zero_quantized_weights: true}}", False),
        ("{zero_optimization: {zero_hpz_partition_size: 2}}", False),
        ("{zero_optimization: {offload_optimizer: {device: nvme, nvme_path: /tmp}}}", False),
        ("{prescale_gradients: true}", False),
        ("{bf16: {enabled: true}}", False),
        ("{bf16: {enabled: auto}}", True),
    ],
)
def test_which_options_leave_the_bits_to_deepspeed(options: str, bits: bool) -> None:
    run = tiny("strategy.name=zero3", f"strategy.options={options}", "precision=bf16")
    assert Job.of(run).same_bits is bits
    own = tiny("strategy.name=zero3", f"strategy.options={options}", "precision=bf16", OWN)
    assert not Job.of(own).same_bits


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("strategy.name=zero3", *BF16_WEIGHTS), "strategy.options.bf16"),
        (
            ("strategy.name=zero1", "strategy.options={communication_data_type: bf16}"),
            "strategy.options.communication_data_type",
        ),
        (
            (
                "strategy.name=hf_accelerate",
                "precision=bf16",
                "strategy.options={deepspeed: {zero_stage: 2, bf16: {enabled: true}}}",
            ),
            "strategy.options.deepspeed.bf16",
        ),
        (("strategy.name=hf_accelerate", "strategy.options={fsdp: {mixed_precision_policy: bf16}}"), "fsdp.mixed_pre"),
        (("strategy.name=hf_trainer", "strategy.options={torch_compile: true}"), "strategy.options.torch_compile"),
        (
            ("strategy.name=fsdp2", "strategy.options={gather: micro_batch, reduce_dtype: bf16}"),
            "strategy.options.reduce_dtype",
        ),
    ],
)
def test_options_without_the_bits_are_refused_unless_exact_is_false(words: tuple[str, ...], key: str) -> None:
    with raises("LS5138", key, "strategy.exact=false"):
        resolve_strategy(tiny(*words), 2)
    own = tiny(*words, OWN)
    assert not Job.of(own, 2).same_bits


# 8 micro-batches on 3 ranks: a padding micro-batch fills up the last round. Two ranks run with each option below
@pytest.mark.parametrize("ranks", [long(1), long(2), 3])
@pytest.mark.parametrize("stage", [long(1), long(2), 3])
def test_equal_to_single_to_rounding(stage: int, ranks: int, single: dict[str, Any]) -> None:
    assert_equal_to_rounding(strategy_class(f"zero{stage}", ranks, OWN, *SGD), single)


@pytest.mark.parametrize("stage", [long(1), 2, 3])  # DeepSpeed has the code of 2 for 1
def test_adamw_has_the_losses_and_norms_of_single(stage: int, single_adamw: dict[str, Any]) -> None:
    single, found = single_adamw, strategy_class(f"zero{stage}", 2, OWN)
    assert found["loss"] == pytest.approx(single["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(single["norm"], rel=2e-5)
    assert found["state"].keys() == single["state"].keys()
    assert {v.dtype for k, v in found["state"].items() if "exp_avg" in k} == {torch.float32}


OPTIONS = [
    long(1, "parameter_alignment: true"),
    long(2, "overlap_comm: true, reduce_bucket_size: 5000"),
    (2, "offload_optimizer: {device: cpu}"),
    (3, "overlap_comm: false, sub_group_size: 3000, stage3_param_persistence_threshold: 1000"),
    long(3, "offload_optimizer: {device: cpu}"),
]


@pytest.mark.parametrize(("stage", "option"), OPTIONS)
def test_options_pass_through(stage: int, option: str, single: dict[str, Any]) -> None:
    given = f"strategy.options={{zero_optimization: {{{option}}}, communication_data_type: fp32}}"
    own, found = (strategy_class(f"zero{stage}", 2, *SGD, given, exact) for exact in (OWN, "strategy.exact=true"))
    assert_equal_to_rounding(own, single)
    assert_same_bits(found, single)
    options = yaml.safe_load(f"{{{option}}}")
    for name, value in options.items():
        assert differing(found["engine"][name], value) == [], name
        assert differing(defaults(stage)[name], value) != [], f"{name}: dropping it would not show"


def differing(held: Any, value: Any) -> list[Any]:
    """Return the values that an engine holds for an option if they differ from those set."""
    if isinstance(value, dict):
        inner = held or {}
        return [name for name in value if str(inner.get(name)) != str(value[name])]
    return [] if held == value else [held]


def defaults(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's defaults for a stage."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig(stage=stage).model_dump(by_alias=True, mode="json")


def told(world: World, run: Run) -> list[Any]:
    strategy = build(run, world)[1]
    engine = strategy.engine
    asked = [engine.zero_reduce_bucket_size(), engine.zero_overlap_comm(), engine.communication_data_type]
    strategy.close()
    return asked


def test_options_reach_the_engine() -> None:
    given = "{zero_optimization: {reduce_bucket_size: 5000, overlap_comm: true}, communication_data_type: bf16}"
    run = tiny("strategy.name=zero2", f"strategy.options={given}")
    assert run_on(1, told, run)[0] == [5000, True, torch.bfloat16]


@pytest.mark.parametrize("extra", [("precision=bf16",), BF16_WEIGHTS], ids=["autocast", "bf16 weights"])
@pytest.mark.parametrize("stage", [long(1), long(2), 3])
def test_inexact_bf16_is_close_to_single(
    stage: int, extra: tuple[str, ...], single: dict[str, Any], single_bf16: dict[str, Any]
) -> None:
    bf16 = single_bf16
    found = strategy_class(f"zero{stage}", 2, OWN, *extra, *SGD)
    exact_at_first = 1e-6 if len(extra) == 1 else 2e-3
    assert found["loss"][0] == pytest.approx(bf16["loss"][0], rel=exact_at_first)
    assert found["loss"] == pytest.approx(bf16["loss"], rel=2e-3)
    assert found["norm"] == pytest.approx(bf16["norm"], rel=2e-2)
    assert found["loss"][0] != single["loss"][0]  # it did compute in bf16
    assert {v.dtype for v in found["export"].values() if v.is_floating_point()} == {torch.float32}


class Averaged(Zero):
    """Control: the average that DeepSpeed computes over ranks is not multiplied back to a sum."""

    stage = 2

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        backward, size = self.engine.backward, self.world.size
        self.engine.backward = lambda loss, **options: backward(loss / size, **options)
        result = super().train_step(batch, learning_rate)
        self.engine.backward = backward
        return result


def averaged(world: World, run: Run) -> float:
    task, _ = build(run, world)
    strategy = Averaged(Job.of(run), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    norm = float(strategy.train_step(feed.make(0), 1e-3).grad_norm)
    strategy.close()
    return norm


def test_the_control_an_average_over_ranks_is_seen_in_the_norm(single: dict[str, Any]) -> None:
    run = tiny("data.limit=56", "strategy.name=single", OWN)
    assert run_on(2, averaged, run)[0] == pytest.approx(single["norm"][0] / 2, rel=1e-5)


def stopped(world: World, run: Run) -> tuple[str, dict[str, torch.Tensor], list[float]]:
    """Train three steps, save the state, and train two more."""
    _, strategy, feed = build_with_feed(run, world)
    for t in range(3):
        strategy.train_step(feed.make(t), 1e-3)
    kept = {k: v.clone() for k, v in strategy.state.state_dict().items()}
    losses = [float(strategy.train_step(feed.make(t), 1e-3).loss) for t in (3, 4)]
    after = digest(strategy.state.state_dict())
    strategy.close()
    return after, kept, losses


def resumed(world: World, run: Run, kept: dict[str, torch.Tensor]) -> tuple[str, str, list[float]]:
    _, strategy, feed = build_with_feed(run, world)
    strategy.state.load_state_dict(kept)
    taken_over = digest(strategy.state.state_dict())
    losses = [float(strategy.train_step(feed.make(t), 1e-3).loss) for t in (3, 4)]
    after = digest(strategy.state.state_dict())
    strategy.close()
    return after, taken_over, losses


def travel(start: tuple[str, int], end: tuple[str, int], *overrides: str) -> tuple[bool, list[float], list[float]]:
    """Return whether resuming gives the bits of not stopping, and the losses of both."""
    run = tiny(f"strategy.name={start[0]}", *overrides)
    straight, kept, losses = run_on(start[1], stopped, run)[0]
    run = tiny(f"strategy.name={end[0]}", *overrides)
    again, taken_over, others = run_on(end[1], resumed, run, kept)[0]
    assert taken_over == digest(kept)  # the state survives the change
    return straight == again, losses, others


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [long(1, ()), long(2, ()), (3, ()), long(3, SGD), long(1, BF16_WEIGHTS), long(3, BF16_WEIGHTS)],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(stage: int, overrides: tuple[str, ...]) -> None:
    same, *_ = travel((f"zero{stage}", 2), (f"zero{stage}", 2), OWN, *overrides)
    assert same


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (("single", 1), ("zero3", 3)),
        slow(("zero3", 3), ("single", 1)),
        long(("zero3", 2), ("zero1", 3)),
        long(("zero1", 3), ("zero2", 1)),
        (("zero2", 2), ("ddp", 2)),
    ],
)
def test_state_moves_between_strategies_and_numbers_of_processes(start: tuple[str, int], end: tuple[str, int]) -> None:
    same, losses, others = travel(start, end)
    assert same
    assert others == losses
    _, losses, others = travel(start, end, OWN)
    assert others == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("{gradient_clipping: 1.0}", "gradient_clipping", "optim.max_grad_norm"),
        ("{train_batch_size: 8}", "train_batch_size", "batch_size, which is"),
        ("{optimizer: {type: Adam}}", "optimizer", "key optim"),
        ("{fp16: {enabled: true}}", "fp16", "precision"),
        ("{bf16: {enabled: true}}", "bf16", "precision=bf16"),
        ("{zero_optimization: {stage: 3}}", "zero_optimization.stage", "strategy.name"),
        ("{zero_optimization: {round_robin_gradients: true}}", "zero_optimization.round_robin_gradients", "order"),
        ("{zero_optimization: true}", "zero_optimization", "True"),
        ("{zero_optimization: {overlap_com: true}}", "zero_optimization.overlap_com", "no such option"),
        ("{zero_optimization: {reduce_bucket_size: many}}", "zero_optimization.reduce_bucket_size", "'many'"),
        ("{comunication_data_type: fp32}", "comunication_data_type", "communication_data_type"),  # DeepSpeed ignores it
    ],
)
def test_options_that_deepspeed_ignores_or_other_keys_set_are_refused(options: str, key: str, value: str) -> None:
    run = tiny("strategy.name=zero2", f"strategy.options={options}")
    with raises("LS4131", f"strategy.options.{key}: ", value):
        class_of(run).check(Job.of(run, 2))


@pytest.mark.parametrize(
    ("name", "options"),
    [("zero3", {}), ("hf_accelerate", {"deepspeed": {"zero_stage": 3}})],
    ids=["zero3", "accelerate"],
)
@pytest.mark.parametrize("family", layers.READS_WITHIN)
def test_recomputation_is_refused_for_weights_used_outside_their_module(
    family: str, name: str, options: dict[str, Any]
) -> None:
    """Recomputed activations are refused for these families: DeepSpeed fails with a traceback."""
    from transformers import CONFIG_MAPPING

    drops = {key: 0.0 for key in CONFIG_MAPPING[family]().to_dict() if key.endswith("layerdrop")}
    model = {"type": family, "config": drops, "checkpoint_activations": True}
    run = tiny(model=model, strategy={"name": name, "options": options})
    with raises("LS4105", "model.checkpoint_activations: ", family):
        class_of(run).check(Job.of(run, 2))


@pytest.mark.parametrize(("head", "family"), sorted(layers.NEVER_IN_TIME))
def test_weights_that_are_never_gathered_in_time_are_refused(head: str, family: str) -> None:
    tasks: dict[str, dict[str, Any]] = {
        "causal": {"name": "language_modeling", "block_size": 16},
        "masked": {"name": "masked_language_modeling"},
    }
    for name, options in (("zero3", {}), ("hf_accelerate", {"deepspeed": {"zero_stage": 3}})):
        run = tiny(model={"type": family}, task=tasks[head], strategy={"name": name, "options": options})
        with raises("LS4107", "fsdp2"):
            class_of(run).check(Job.of(run, 2))
    run = tiny("strategy.name=zero2", model={"type": family}, task=tasks[head])
    class_of(run).check(Job.of(run, 2))


def tried(world: World, run: Run) -> None:
    """Run the first step, with the preparation before it."""
    _, strategy, feed = build_with_feed(run, world)
    strategy.dry_run(feed.longest())
    strategy.train_step(feed.make(0), 1e-3)


def test_weights_in_another_order_than_recorded_are_one_message() -> None:
    """A family in no list is detected by a first step in the order that DeepSpeed recorded."""
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2, "state_size": 16, "n_groups": 2}
    task = {"name": "language_modeling", "block_size": 16, "samples": 0}
    with raises("LS4107", "fsdp2", error=AssertionError):
        run_on(2, tried, tiny("strategy.name=zero3", model={"type": "mamba2", "config": sizes}, task=task))


def test_shared_activation_modules_are_copied_per_model() -> None:
    """Each model gets its own activations: DeepSpeed's hooks on shared ones act on other models, and ranks deadlock."""
    from transformers import FlaubertConfig, FlaubertModel
    from transformers.activations import gelu

    config = FlaubertConfig(vocab_size=20, emb_dim=16, n_layers=1, n_heads=2)
    model, other = FlaubertModel(config), FlaubertModel(config)
    assert model.ffns[0].act is other.ffns[0].act is gelu  # control
    own_activations(model)
    assert model.ffns[0].act is not gelu
    assert type(model.ffns[0].act) is type(gelu)
    assert other.ffns[0].act is gelu


def test_importing_the_strategies_and_an_export_import_no_deepspeed(tmp_path: Path) -> None:
    """Accelerate would import DeepSpeed, which takes seconds, to test whether it wraps the model that transformers
    saves."""
    code = (
        "import sys, lockstep.strategies.zero1, lockstep.strategies.zero3\n"
        "by_strategies = 'deepspeed' in sys.modules\n"
        "from pathlib import Path; from transformers import BertConfig, BertModel\n"
        "from lockstep.tasks.models import models\n"
        "sizes = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)\n"
        "model = BertModel(BertConfig(**sizes))\n"
        "models.save(model, model.state_dict(), None, Path(sys.argv[1]))\n"
        "unwanted = 'deepspeed' in sys.modules\n"
        "model.save_pretrained(sys.argv[1])\n"
        "print(by_strategies, unwanted, 'deepspeed' in sys.modules)  # the control: by itself transformers does\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["False", "False", "True"]
    assert (tmp_path / "model.safetensors").is_file()
