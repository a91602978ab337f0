"""Pipelines: the bits of a single process, for every family, schedule and shape of the job; and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from harness import build, digest, run_on, tiny
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lockstep import models
from lockstep.batch import IGNORED, MicroBatch
from lockstep.data.feed import Feed
from lockstep.data.tokens import Columns
from lockstep.optim import learning_rate
from lockstep.run import Run, RunError
from lockstep.strategies.pipeline import Pipeline
from lockstep.tasks.classification import Classification
from lockstep.train import evaluate
from lockstep.world import World, seed_libraries

FOUR = "model.config.n_layer=4"
NAMES = ((1, "single"), (2, "pipeline"))


def steps_of(world: World, run: Run, steps: int = 3) -> dict[str, Any]:
    """Train a few steps; what must be equal everywhere."""
    task, strategy = build(run, world)
    feed = Feed(run, task, strategy.leaves(), world.device)
    results = [strategy.train_step(feed.make(t), learning_rate(run.optim, t + 1, 6)) for t in range(steps)]
    state, export = strategy.state(), strategy.export()
    found = {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "names": list(state),
        "state": digest(state),
        "export": digest(export) if export is not None else None,
        "weights": {k: v.clone() for k, v in state.items() if k.startswith("model.")},
        "count": strategy.parameter_count,
        "held": sum(p.numel() for p in strategy.model.parameters()),
        "clear": all(p.grad is None for p in strategy.model.parameters()),
    }
    strategy.close()
    return found


def of(ranks: int, *overrides: str) -> dict[str, Any]:
    """Rank 0's findings; what every rank must agree on is checked."""
    run = tiny(*overrides)
    first, *others = run_on(ranks, steps_of, run, run=run)
    for other in others:
        assert {k: other[k] for k in ("loss", "norm", "count")} == {k: first[k] for k in ("loss", "norm", "count")}
        assert other["clear"]
        assert other["export"] is None
    assert first["held"] < first["count"] or ranks == 1
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
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
    "qwen2": SMALL + ", num_key_value_heads: 1, layer_types: [sliding_attention, full_attention], sliding_window: 4}",
    "qwen3": SMALL + ", num_key_value_heads: 1, head_dim: 8}",
    "distilbert": "model.config={dim: 32, n_layers: 2, n_heads: 2, hidden_dim: 48, max_position_embeddings: 40}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_of_one_process(family: str) -> None:
    model = (f"model.type={family}", FAMILIES[family])
    for precision in ("fp32", "bf16"):
        one, two = (of(n, *model, f"precision={precision}", f"strategy.name={s}") for n, s in NAMES)
        same(two, one)


class Language(Classification):
    """The next token, with a head that shares the embedding's weight unless the config says otherwise."""

    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return self.made(AutoModelForCausalLM, models.load_config(self.run), empty)

    def made(self, kind: Any, config: Any, empty: bool) -> nn.Module:
        config.vocab_size, config.pad_token_id = len(self.tokenizer), self.tokenizer.pad_token_id
        seed_libraries(self.run.seed)
        with torch.device("meta" if empty else "cpu"):
            return kind.from_config(config)

    def collate(self, columns: Columns, rows: np.ndarray, leaf: int) -> MicroBatch:
        micro = super().collate(columns, rows, leaf)
        targets = micro.inputs["input_ids"].roll(-1, 1).masked_fill(micro.inputs["attention_mask"] == 0, IGNORED)
        targets[:, -1] = IGNORED
        return MicroBatch(leaf, micro.inputs, torch.full_like(targets, IGNORED) if len(rows) == 0 else targets)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.lengths[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


class Bart(Language):
    """The first half of the text from all of it."""

    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForSeq2SeqLM, BartConfig

        return self.made(AutoModelForSeq2SeqLM, BartConfig(**self.run.model.config), empty)

    def collate(self, columns: Columns, rows: np.ndarray, leaf: int) -> MicroBatch:
        micro = super().collate(columns, rows, leaf)
        half = micro.targets.shape[1] // 2 + 1
        inputs = {**micro.inputs, "decoder_input_ids": micro.inputs["input_ids"][:, :half].contiguous()}
        return MicroBatch(leaf, inputs, micro.targets[:, :half].contiguous())


class Marian(Bart):
    def model(self, empty: bool = False) -> nn.Module:
        from transformers import AutoModelForSeq2SeqLM, MarianConfig

        size = {"decoder_vocab_size": len(self.tokenizer)}
        return self.made(AutoModelForSeq2SeqLM, MarianConfig(**self.run.model.config, **size), empty)


HALVES = (
    "model.type=bart",
    "model.config={d_model: 32, encoder_layers: 2, decoder_layers: 3, encoder_attention_heads: 2, "
    "decoder_attention_heads: 2, encoder_ffn_dim: 48, decoder_ffn_dim: 48, max_position_embeddings: 40}",
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "ranks", "options"), [("gpt2", 2, ()), ("llama", 2, ()), ("gpt2", 4, ("stages=2",))]
)
def test_language_models_share_a_weight_between_first_and_last_stage(
    family: str, ranks: int, options: tuple[str, ...], tied: bool
) -> None:
    model = () if family == "gpt2" else (f"model.type={family}", FAMILIES[family])
    model += (f"model.config.tie_word_embeddings={tied}", "task.name=test_pipeline.Language")
    options = tuple(f"strategy.options.{o}" for o in options)
    for precision in ("fp32", "bf16"):
        one = of(1, *model, "strategy.name=single", f"precision={precision}")
        same(of(ranks, *model, *options, "strategy.name=pipeline", f"precision={precision}"), one)


@pytest.mark.parametrize("kind", ["Bart", "Marian"])
def test_encoder_and_decoder_on_different_stages(kind: str) -> None:
    job = (*HALVES, f"task.name=test_pipeline.{kind}")
    for precision in ("fp32", "bf16"):
        one = of(1, *job, "strategy.name=single", f"precision={precision}")
        for ranks, *options in ((2,), (3,), (4, "schedule=gpipe"), (2, "schedule=interleaved"), (4, "stages=2")):
            chosen = (f"strategy.options.{o}" for o in options)
            same(of(ranks, *job, *chosen, "strategy.name=pipeline", f"precision={precision}"), one)
