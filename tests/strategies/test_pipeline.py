"""Pipelines have the bits of one process, for every family, schedule and job shape; unsupported runs are refused."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lockstep.config.run import Run, RunError
from lockstep.config.schedules import learning_rate
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.job import Job
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.world import World
from lockstep.strategies.engines import cuts, layers, pipelining
from lockstep.strategies.observer import GradientRecorder
from lockstep.strategies.pipeline import Pipeline
from lockstep.tasks.classification import Classification
from lockstep.tasks.models import model_configs
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import long, slow
from support.messages import raises

FOUR = "model.config.n_layer=4"
FEWER = "micro_batches=4"  # half the computation, for tests in which their number does not matter
NAMES = ((1, "single"), (2, "pipeline"))


def steps_of(world: World, run: Run, steps: int = 2) -> dict[str, Any]:
    """Train a few steps; what must be equal everywhere."""
    _, strategy, feed = build_with_feed(run, world)
    results = [strategy.train_step(feed.make(t), learning_rate(run.optim, t + 1, 6)) for t in range(steps)]
    state, export = strategy.state.state_dict(), strategy.state.export()
    found = {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "names": list(state),
        "state": digest(state),
        "export": digest(export) if export is not None else None,
        "weights": {k: v.clone() for k, v in state.items() if k.startswith("model.")},
        "count": strategy.weights.parameter_count,
        "held": sum(p.numel() for p in strategy.model.parameters()),
        "clear": all(p.grad is None for p in strategy.model.parameters()),
    }
    strategy.close()
    return found


@cache  # several pipelines are compared with one process
def of(ranks: int, *overrides: str) -> dict[str, Any]:
    """Return rank 0's results; check that all ranks agree."""
    run = tiny(*overrides)
    first, *others = run_on(ranks, steps_of, run)
    for other in others:
        assert {k: other[k] for k in ("loss", "norm", "count")} == {k: first[k] for k in ("loss", "norm", "count")}
        assert other["clear"]
        assert other["export"] is None
    assert first["held"] < first["count"] or run.strategy.name != "pipeline"
    return first


def same(pipelined: dict[str, Any], single: dict[str, Any]) -> None:
    for key in ("loss", "norm", "count", "names", "state", "export"):
        assert pipelined[key] == single[key], key


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Any]]:
    return {p: of(1, "strategy.name=single", FOUR, f"precision={p}") for p in ("fp32", "bf16")}


SHAPES = {
    "2 stages": (2, ()),
    "3 stages": (3, ()),
    "4 stages, gpipe": (4, ("schedule=gpipe",)),
    "2 stages, interleaved": (2, ("schedule=interleaved",)),
    "2 x 2": (4, ("stages=2",)),
    "2 x 2, interleaved": (4, ("stages=2", "schedule=interleaved", "stages_per_rank=2")),
}


@pytest.mark.processes
# CI runs one precision of each shape, in turns.
@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        ((shape, precision) if (i + j) % 2 == 0 else long(shape, precision))
        for i, shape in enumerate(SHAPES)
        for j, precision in enumerate(("fp32", "bf16"))
    ],
)
def test_a_pipeline_has_the_bits_of_one_process(shape: str, precision: str, single: dict) -> None:
    ranks, options = SHAPES[shape]
    options = tuple(f"strategy.options.{o}" for o in options)
    same(of(ranks, "strategy.name=pipeline", FOUR, f"precision={precision}", *options), single[precision])


SMALL = "model.config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 48"
FAMILIES = {
    "bert": SMALL + ", max_position_embeddings: 40}",
    "roberta": SMALL + ", max_position_embeddings: 40}",
    "llama": SMALL + ", num_key_value_heads: 1, attention_dropout: 0.1}",
    "mistral": SMALL + ", num_key_value_heads: 1, attention_dropout: 0.1, sliding_window: 4}",
    "qwen2": SMALL
    + ", num_key_value_heads: 1, use_sliding_window: true, layer_types: [sliding_attention, full_attention], "
    "sliding_window: 4}",
    "qwen3": SMALL + ", num_key_value_heads: 1, head_dim: 8}",
    "distilbert": "model.config={dim: 32, n_layers: 2, n_heads: 2, hidden_dim: 48, max_position_embeddings: 40}",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "family",
    [long(name) if name in ("roberta", "mistral", "qwen3", "qwen2", "distilbert") else name for name in FAMILIES],
)
def test_every_family_has_the_bits_of_one_process(family: str) -> None:
    model = (f"model.type={family}", FAMILIES[family], FEWER)
    for precision in ("fp32", "bf16"):
        one, two = (of(n, *model, f"precision={precision}", f"strategy.name={s}") for n, s in NAMES)
        same(two, one)


class Language(Classification):
    """Next-token prediction, with a head that is tied to the embedding unless the config says otherwise."""

    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return self.made(AutoModelForCausalLM, model_configs.load_config(self.run.model), empty)

    def made(self, kind: Any, config: Any, empty: bool) -> nn.Module:
        config.vocab_size, config.pad_token_id = len(self.tokenizer), self.tokenizer.pad_token_id
        seed_libraries(self.run.seed)
        with torch.device("meta" if empty else "cpu"):
            return kind.from_config(config)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        micro = super().collate(columns, rows, index)
        targets = micro.inputs["input_ids"].roll(-1, 1).masked_fill(micro.inputs["attention_mask"] == 0, IGNORED)
        targets[:, -1] = IGNORED
        return MicroBatch(index, micro.inputs, torch.full_like(targets, IGNORED) if len(rows) == 0 else targets)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.lengths[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


class Bart(Language):
    """Predict the first half of a text from the whole text."""

    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForSeq2SeqLM, BartConfig

        return self.made(AutoModelForSeq2SeqLM, BartConfig(**self.run.model.config), empty)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        micro = super().collate(columns, rows, index)
        half = micro.targets.shape[1] // 2 + 1
        inputs = {**micro.inputs, "decoder_input_ids": micro.inputs["input_ids"][:, :half].contiguous()}
        return MicroBatch(index, inputs, micro.targets[:, :half].contiguous())


class Marian(Bart):
    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForSeq2SeqLM, MarianConfig

        size = {"decoder_vocab_size": len(self.tokenizer)}
        return self.made(AutoModelForSeq2SeqLM, MarianConfig(**self.run.model.config, **size), empty)


PROMPTED = ("task={name: language_modeling, prompt: text, response: text}",)  # a causal language model's task
HALVES = (
    "model.type=bart",
    "model.config={d_model: 32, encoder_layers: 2, decoder_layers: 3, encoder_attention_heads: 2, "
    "decoder_attention_heads: 2, encoder_ffn_dim: 48, decoder_ffn_dim: 48, max_position_embeddings: 40}",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "ranks", "options", "tied"),
    [
        ("gpt2", 2, (), True),
        long("gpt2", 2, (), False),
        long("llama", 2, (), True),
        ("llama", 2, (), False),
        ("gpt2", 4, ("stages=2",), True),
        long("gpt2", 4, ("stages=2",), False),
    ],
)
def test_language_models_share_a_weight_between_first_and_last_stage(
    family: str, ranks: int, options: tuple[str, ...], tied: bool
) -> None:
    model = () if family == "gpt2" else (f"model.type={family}", FAMILIES[family])
    model += (FEWER, f"model.config.tie_word_embeddings={tied}", "task.name=test_pipeline.Language")
    options = tuple(f"strategy.options.{o}" for o in options)
    for precision in ("fp32", "bf16"):
        one = of(1, *model, "strategy.name=single", f"precision={precision}")
        same(of(ranks, *model, *options, "strategy.name=pipeline", f"precision={precision}"), one)


HALVED = {  # every kind and number of layers, in every job shape
    "2 stages": (2,),
    "3 stages": (3,),
    "4 stages, gpipe": (4, "schedule=gpipe"),
    "2 stages, interleaved": (2, "schedule=interleaved"),
    "2 x 2": (4, "stages=2"),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "encoder_layers", "shapes"),
    [
        long("Bart", 1, tuple(HALVED)),
        slow("Bart", 2, ("2 stages",)),
        long("Marian", 1, ("2 stages, interleaved",)),
        slow("Marian", 2, tuple(HALVED)),
    ],
)
def test_encoder_and_decoder_on_different_stages(kind: str, encoder_layers: int, shapes: tuple[str, ...]) -> None:
    """With one encoder layer, the first of two stages uses the embedding twice, the last one once."""
    job = (*HALVES, FEWER, f"model.config.encoder_layers={encoder_layers}", f"task.name=test_pipeline.{kind}")
    one = of(1, *job, "strategy.name=single")
    for ranks, *options in map(HALVED.__getitem__, shapes):
        same(of(ranks, *job, *(f"strategy.options.{o}" for o in options), "strategy.name=pipeline"), one)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "tied"),
    [("Marian", "true"), *(long(*each) for each in (("Marian", "false"), ("Bart", "true"), ("Bart", "false")))],
)
def test_encoder_and_decoder_in_bf16(kind: str, tied: str) -> None:
    """Tied weights are used three times: each micro-batch casts them again, so that their gradients are added in one
    order."""
    words = (*HALVES, FEWER, f"model.config.tie_word_embeddings={tied}", f"task.name=test_pipeline.{kind}")
    words += ("precision=bf16",)
    one = of(1, *words, "strategy.name=single")
    same(of(2, *words, "strategy.name=pipeline"), one)
    same(of(4, *words, "strategy.name=pipeline"), one)
    same(of(2, *words, "strategy.name=allreduce"), one)


def restored(world: World, run: Run, kept: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Load a state, or train two steps without one; return the state at that point, and its digest after one more
    step."""
    _, strategy, feed = build_with_feed(run, world)
    if kept:
        strategy.state.load_state_dict(kept)
    else:
        for t in range(2):
            strategy.train_step(feed.make(t), 1e-3)
    state = {k: v.clone() for k, v in strategy.state.state_dict().items()}
    strategy.train_step(feed.make(2), 1e-3)
    last = digest(strategy.state.state_dict())
    strategy.close()
    return state, last


@pytest.mark.processes
def test_state_moves_between_strategies() -> None:
    tied = ("task.name=test_pipeline.Language",)
    one, two = (tiny(f"strategy.name={name}", *tied) for name in ("single", "pipeline"))
    state, after = run_on(1, restored, one, {})[0]
    piped, piped_after = run_on(2, restored, two, {})[0]
    assert (digest(piped), piped_after) == (digest(state), after)
    assert list(piped) == list(state)
    assert run_on(2, restored, two, state)[0][1] == after
    assert run_on(1, restored, one, piped)[0][1] == after


def evaluated(world: World, run: Run) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics after a step, and the gradient of that step."""
    task, strategy = build(run, world)
    strategy.observer = recorder = GradientRecorder(world)
    strategy.train_step(StepLoader(task, strategy.own_micro_batches(), world.device).make(0), 1e-2)
    found = evaluate(world, task, strategy, task.splits["validation"])
    strategy.close()
    return found, recorder.gradients


@cache
def evaluated_alone(*common: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    run = tiny("strategy.name=single", *common)
    found: tuple[dict[str, float], dict[str, Tensor]] = run_on(1, evaluated, run)[0]
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "options"), [(2, ()), long(2, ("schedule=interleaved",)), (4, ("stages=2",))])
def test_scores_and_gradients_equal_those_of_one_process(ranks: int, options: tuple[str, ...]) -> None:
    for precision in ("fp32", "bf16"):
        common = (FOUR, f"precision={precision}", "evaluate.batch_size=8")
        piped = tiny("strategy.name=pipeline", *common, *(f"strategy.options.{o}" for o in options))
        metrics, gradients = evaluated_alone(*common)
        (first, heard), *others = run_on(ranks, evaluated, piped)
        assert first == metrics
        assert all(found == metrics and not nothing for found, nothing in others)
        assert list(heard) == list(gradients)
        assert all(torch.equal(heard[name], gradient) for name, gradient in gradients.items())


@pytest.mark.processes
@pytest.mark.parametrize("task", [long("classification"), "test_pipeline.Language"])
def test_autograd_s_own_sums_are_equal_to_rounding(task: str) -> None:
    sgd = (f"task.name={task}", FOUR, "optim.name=sgd", "optim.learning_rate=0.1")
    exact = of(1, *sgd, "strategy.name=single")
    for ranks, *options in ((2,), (4, "stages=2"), (2, "schedule=interleaved")):
        chosen = (f"strategy.options.{o}" for o in options)
        found = of(ranks, *sgd, *chosen, "strategy.name=pipeline", "strategy.exact=false")
        assert found["loss"] == pytest.approx(exact["loss"], rel=1e-6)
        assert found["norm"] == pytest.approx(exact["norm"], rel=2e-6)
        for key, weight in exact["weights"].items():
            assert (found["weights"][key] - weight).abs().max() <= 1e-6, key


@pytest.mark.parametrize(
    ("processes", "overrides", "said"),
    [
        (1, (), "strategy.name: pipeline needs two processes or more"),
        (2, ("strategy.options.chunks=3",), "strategy.options: pipeline has no option"),
        (
            2,
            ("strategy.options.schedule=zigzag",),
            "strategy.options.schedule: invalid value 'zigzag'; expected one of gpipe",
        ),
        (2, ("strategy.options.stages=1",), "strategy.options.stages: invalid value 1; expected an integer >= 2"),
        (2, ("strategy.options.stages=true",), "strategy.options.stages: invalid value True"),
        (
            2,
            ("strategy.options.stages_per_rank=2",),
            "strategy.options.stages_per_rank: only strategy.options.schedule",
        ),
        (3, ("strategy.options.stages=2",), "strategy.options.stages: 2 stages do not divide 3 processes"),
        (3, (), "strategy.name: pipeline makes one stage of each of 3 processes, more than the model's 2 layers"),
        (4, (), "set strategy.options.stages to 2 or less"),
        (2, ("strategy.options.schedule=interleaved",), "2 ranks with 2 stages each are 4 stages, more than"),
        (2, ("micro_batches=1",), "micro_batches: 1 on 1 pipeline are 1 each, but 1f1b needs at least as many"),
        (4, ("micro_batches=1", "strategy.options.stages=2"), "are 0 each, but every pipeline needs one"),
        (
            2,
            (FOUR, "micro_batches=5", "strategy.options.schedule=interleaved"),
            "interleaved runs 2 rounds of equal size on 2 ranks",
        ),
        (2, ("model.type=t5", "model.config={}"), "strategy.name: pipeline cannot split a model of the type 't5'"),
        (2, (*HALVES, *PROMPTED), "strategy.name: pipeline cannot split the decoder of a bart without its encoder"),
        (2, (*HALVES, "model.config.decoder_layerdrop=0.1"), "model.config.decoder_layerdrop: a pipeline cannot"),
    ],
)
def test_unsupported_options_are_refused_before_the_model_is_built(processes: int, overrides: tuple, said: str) -> None:
    with pytest.raises(RunError) as error:
        Pipeline.check(Job.of(tiny("strategy.name=pipeline", *overrides), processes))
    assert said in str(error.value)


@pytest.mark.parametrize(("processes", "stages"), [(2, ()), (4, ("strategy.options.stages=2",))])
def test_two_layers_are_enough_for_two_stages(processes: int, stages: tuple[str, ...]) -> None:
    Pipeline.check(Job.of(tiny("strategy.name=pipeline", *stages), processes))


@pytest.mark.processes
def test_more_micro_batches_than_examples_give_padding_micro_batches() -> None:
    short = ("data.limit=9", "batch_size=8", "micro_batches=8", "steps=4")  # every second step has one example
    same(of(2, *short, "strategy.name=pipeline"), of(1, *short, "strategy.name=single"))


@pytest.mark.parametrize("family", sorted(cuts.FAMILIES))
def test_a_stage_finds_its_own_layers(family: str) -> None:
    """A stage finds its layers even if the stack's others are on other stages, in a family that does not name its layer
    modules."""
    import transformers

    stacks = cuts.FAMILIES[family]
    sizes = {stack.count: 3 for stack in stacks} | {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3}
    config = transformers.CONFIG_MAPPING[family](**sizes)
    with torch.device("meta"):
        cut = cuts.Cut(transformers.AutoModel.from_config(config), 2 * len(stacks))
    for stage in range(cut.stages):
        part = cut.part(stage).model
        found = {id(block) for block in layers.blocks(part)}
        own = cut.own(stage)
        assert own
        assert all(id(part.get_submodule(path)) in found for path in cut.layers[own.start : own.stop]), stage


def test_an_older_torch_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy class can still be imported with an older torch, as commands that list all strategies do."""
    monkeypatch.setattr(pipelining, "AVAILABLE", False)
    with raises("LS4431", "torch 2.13", torch.__version__):
        Pipeline.check(Job.of(tiny("strategy.name=pipeline"), 2))
