"""Texts padded to a few lengths for `model.compile: whole`: the lengths depend on the data alone, each is compiled once
for each number of examples, and the numbers are those of an uncompiled run to rounding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.checkpoint import manifest
from lockstep.config.run import Run
from lockstep.data import fixed_lengths, host_facts
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.host_facts import RealTokens
from lockstep.data.job import Job, arithmetic_of
from lockstep.data.order import equal_micro_batches
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks, region
from lockstep.tasks.models import repeatable
from lockstep.tasks.task import make_task
from lockstep.training import model_stats, resolve, startup
from lockstep.training.data_loader import StepLoader
from support.harness import build_with_feed, rank_0_of, tiny
from support.marks import long
from support.messages import raises
from support.strategy_runs import steps_of
from support.task_runs import make

WHOLE = "model.compile=whole"
GPT2 = tuple(f"model.config.{name}_pdrop=0.0" for name in ("resid", "embd", "attn"))
BERT = ("model.config.hidden_dropout_prob=0.0", "model.config.attention_probs_dropout_prob=0.0")
LIMIT_S = 1500


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the compiler by a backend that runs the traced graph, and return the list of its functions."""
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def code(*args: Any) -> Any:
            code.calls += 1  # type: ignore[attr-defined]
            return graph(*args)

        code.calls = 0  # type: ignore[attr-defined]
        made.append(code)
        return code

    monkeypatch.setattr(blocks, "BACKEND", backend)
    return made


def resolved(run: Run) -> Run:
    """Return the run with its lengths."""
    return resolve._compiled(Job.of(run, 1).with_data())[0]


def texts(folder: Path, kind: str, *overrides: str) -> Run:
    """A run of one process without dropout."""
    words = BERT if kind == "token_classification" else GPT2
    if kind == "classification":
        return tiny("strategy.name=single", *words, *overrides)
    return make(folder, kind, "strategy.name=single", *words, *overrides)


# -- the lengths --------------------------------------------------------------------------------------------------


def fewest(micro_batches: list[tuple[int, int]], longest: int, count: int) -> int:
    """Fewest padded tokens with `count` lengths, by trying all."""
    steps = range(fixed_lengths.MULTIPLE, longest, fixed_lengths.MULTIPLE)
    every = itertools.combinations(steps, min(count - 1, len(steps)))
    return min(sum(n * fixed_lengths.fit([*some, longest], most) for n, most in micro_batches) for some in every)


@pytest.mark.parametrize("seed", range(20))
def test_the_lengths_need_the_fewest_tokens(seed: int) -> None:
    draw = random.Random(seed)
    longest = draw.randint(3, 90)
    micro_batches = [(draw.randint(1, 9), draw.randint(1, longest)) for _ in range(draw.randint(1, 30))]
    lengths = fixed_lengths.choose(micro_batches, longest)
    assert lengths == sorted({*lengths})
    assert lengths[-1] == longest  # the model may have no more positions
    needed = sum(n * fixed_lengths.fit(lengths, most) for n, most in micro_batches)
    assert needed == fewest(micro_batches, longest, len(lengths))
    if len(lengths) < fixed_lengths.MOST:
        assert fewest(micro_batches, longest, len(lengths) + 1) > fixed_lengths.PAYS * needed


def test_another_length_is_added_only_if_it_saves_tokens() -> None:
    assert fixed_lengths.choose([(8, 63)] * 99 + [(1, 8)], 63) == [63]
    assert fixed_lengths.choose([(8, 63)] * 9 + [(8, 10)] * 9, 63) == [16, 63]


def test_groups_are_of_one_size_and_long_ones_alternate_with_short_ones() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 22)
    groups = equal_micro_batches(lengths, 4)
    assert sorted(np.concatenate(groups).tolist()) == list(range(22))
    assert sorted(len(group) for group in groups) == [5, 5, 6, 6]
    most = [int(lengths[group].max()) for group in groups]
    assert most[0] >= most[2] >= most[3] >= most[1]
    assert [len(group) for group in equal_micro_batches(lengths[:2], 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("by_token", [True, False])
def test_padding_is_masked_and_has_no_target(by_token: bool) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    targets = torch.tensor([[5, 6, 7], [5, IGNORED, IGNORED]]) if by_token else torch.tensor([[1, 0, 1], [0, 0, 1]])
    micro = MicroBatch(3, {"input_ids": mask * 7, "attention_mask": mask, "token_type_ids": mask}, targets)
    wide = fixed_lengths.widened(micro, [2, 5, 9], 4, by_token)
    assert wide.inputs["input_ids"].tolist() == [[7, 7, 7, 4, 4], [7, 0, 0, 4, 4]]
    assert wide.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert wide.inputs["token_type_ids"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    added = [[IGNORED] * 2] * 2
    assert wide.targets.tolist() == [
        [*row, *(more if by_token else [])] for row, more in zip(targets.tolist(), added, strict=True)
    ]


def test_the_run_file_s_lengths_or_the_checkpoint_s_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run pads as its checkpoint did, even if other lengths would be chosen now; another setting is refused
    by name."""
    run = texts(tmp_path, "documents", WHOLE)
    chosen = resolved(run).model.compile_lengths
    assert chosen is not None
    assert chosen[-1] > chosen[0]
    assert resolved(texts(tmp_path, "documents", WHOLE, "steps=60", "epochs=null")).model.compile_lengths == chosen
    assert resolved(texts(tmp_path, "documents", WHOLE, "micro_batches=4")).model.compile_lengths is not None
    own = texts(tmp_path, "documents", WHOLE, f"model.compile_lengths=[9, {chosen[-1]}]")
    assert resolved(own).model.compile_lengths == [9, chosen[-1]]
    assert arithmetic_of(own)["model.compile_lengths"] == [9, chosen[-1]]
    assert "model.compile_lengths" not in arithmetic_of(run)
    before = SimpleNamespace(arithmetic=arithmetic_of(own), data=None)
    assert "model.compile_lengths" not in manifest.differing_keys(Job.of(run).with_data(), before)  # type: ignore[arg-type]
    other = Job.of(resolved(run)).with_data()
    assert "model.compile_lengths" in manifest.differing_keys(other, before)  # type: ignore[arg-type]
    monkeypatch.setattr(manifest, "Manifest", SimpleNamespace)
    monkeypatch.setattr(manifest, "candidates", lambda run: iter([(None, before)]))
    assert resolved(run).model.compile_lengths == [9, chosen[-1]]


def test_lengths_that_cannot_be(tmp_path: Path) -> None:
    with raises("LS4052", "longest text"):
        resolved(texts(tmp_path, "documents", WHOLE, "model.compile_lengths=[4]"))
    unsorted = texts(tmp_path, "documents", WHOLE, "model.compile_lengths=[40, 9, 40]")
    assert resolved(unsorted).model.compile_lengths == [9, 40]
    with raises("LS4051", "cannot be padded"):
        resolved(make(tmp_path, "questions", WHOLE, "model.compile_lengths=[4000]"))


def test_uncompiled_runs_pad_to_no_length(tmp_path: Path) -> None:
    """The key then has no effect, and is told to have none."""
    run = texts(tmp_path, "documents", "model.compile=false", "model.compile_lengths=[60]")
    job = Job.of(run, 1).with_data()
    feed = StepLoader(make_task(job), range(run.micro_batches), torch.device("cpu"))
    assert max(micro.inputs["input_ids"].shape[1] for micro in feed.make(0).micro_batches) < 60
    assert "model.compile_lengths" not in job.arithmetic()
    notes = startup.without_effect(job, feed.total, 1, True)
    assert "model.compile_lengths has no effect without model.compile=whole" in notes


def test_auto_pads_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded texts were measured on no GPU."""
    monkeypatch.setattr(resolve, "gpus_of", lambda run: 1)
    run = resolved(texts(tmp_path, "documents", "steps=5000", "epochs=null"))
    assert run.model.compile is False
    assert run.model.compile_lengths is None


def test_opening_lines_and_plan_report_the_padding(tmp_path: Path) -> None:
    job = Job.of(texts(tmp_path, "documents", WHOLE), 1).with_data()
    job = job.having(resolve._compiled(job)[0])
    lengths = job.run.model.compile_lengths
    feed = StepLoader(make_task(job), range(job.run.micro_batches), torch.device("cpu"))
    batches = [feed.make(step) for step in range(feed.order.steps_per_epoch)]
    for batch in batches[:-1]:  # the last has empty micro-batches
        assert sum(micro.inputs["input_ids"].numel() for micro in batch.micro_batches) == batch.padded
    padded = sum(batch.padded for batch in batches)
    waste = 1 - sum(batch.tokens for batch in batches) / padded
    line = model_stats.facts(job)["lengths"]
    assert f"padded to {', '.join(map(str, lengths or []))} tokens" in line
    assert f"{waste:.0%} of the computed tokens are padding" in line
    assert waste > 0.05


# -- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", long("token_classification"), long("classification")])
def test_one_code_for_each_length_and_the_numbers_of_an_uncompiled_run(
    kind: str, tmp_path: Path, codes: list[Any]
) -> None:
    """All micro-batches of full steps run one of the compiled functions: of two and of one examples, of each length."""
    keys = ("batch_size=12", "micro_batches=8")
    run = resolved(texts(tmp_path, kind, WHOLE, *keys))
    lengths = run.model.compile_lengths
    assert lengths is not None
    assert len(lengths) > 1
    _, strategy, feed = build_with_feed(run, World(run))
    assert len(codes) == 2 * len(lengths)
    before = sum(code.calls for code in codes)
    for step in range(4):
        batch = feed.make(step)
        assert {micro.inputs["input_ids"].shape[1] for micro in batch.micro_batches} <= {*lengths}
        strategy.train_step(batch, 1e-3)
    assert sum(code.calls for code in codes) - before == 4 * 8
    assert len(codes) == 2 * len(lengths)
    strategy.close()
    plain = texts(tmp_path, kind, "model.compile=false", *keys)
    compiled, eager = (steps_of(World(each), each) for each in (run, plain))
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert compiled["norm"] == pytest.approx(eager["norm"], rel=1e-4)


@pytest.mark.slow
def test_facts_about_a_mask_are_no_constants_of_the_code(tmp_path: Path, codes: list[Any]) -> None:
    """On a GPU the loader attaches facts to each mask. Code that depended on them would fit one micro-batch."""
    run = resolved(texts(tmp_path, "token_classification", WHOLE))
    _, strategy, feed = build_with_feed(run, World(run))
    before = sum(code.calls for code in codes)
    batch = feed.make(0)
    for micro in batch.micro_batches:
        mask = micro.inputs["attention_mask"]
        host_facts.attach(mask, RealTokens.of(mask))
    strategy.train_step(batch, 1e-3)
    assert sum(code.calls for code in codes) - before == len(batch.micro_batches)
    strategy.close()


@pytest.mark.slow
def test_padding_changes_no_number(tmp_path: Path, codes: list[Any]) -> None:
    """The same texts padded further have the same loss and gradients to rounding, whatever token pads."""
    run = resolved(texts(tmp_path, "token_classification", WHOLE, "model.compile_lengths=[40, 60]"))
    _, strategy, feed = build_with_feed(run, World(run))
    micro = feed.make(0).micro_batches[0]
    wide = fixed_lengths.widened(micro, [60], 1, True)
    assert wide.inputs["input_ids"].shape[1] > micro.inputs["input_ids"].shape[1]
    assert strategy.region is not None
    (loss, slopes), (other, others) = (region._by_code(strategy.region, strategy.model, m) for m in (micro, wide))
    torch.testing.assert_close(other, loss)
    for slope, another in zip(slopes, others, strict=True):
        if slope is not None:
            torch.testing.assert_close(another, slope, rtol=1e-4, atol=1e-6)
    strategy.close()


def test_gradients_of_reading_by_index_are_no_atomic_additions() -> None:
    """A classifier reads each text's last token by index."""

    def gradient(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        states = states.requires_grad_()
        read = states[torch.arange(3), places]
        return torch.autograd.grad((read * read).sum(), states)[0]

    states, places = torch.randn(3, 5, 4), torch.tensor([1, 4, 1])
    traced = make_fx(gradient)(states, places)
    repeatable.replace_sums(traced.graph)
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes]
    assert torch.ops.lockstep.index_put_sum.default in targets
    assert torch.ops.aten.index_put.default not in targets
    assert torch.equal(traced(states, places), gradient(states, places))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_written_out(causal: bool, heads: int) -> None:
    query, key, value = (torch.randn(2, count, 6, 8) for count in (4, heads, heads))
    visible = None if causal else (torch.arange(6) < torch.tensor([[6], [3]]))[:, None, None]
    out = repeatable.written_out(query, key, value, visible, causal, 0.0, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("kind", ["classification", "token_classification"])
def test_the_bits_of_one_process_under_every_strategy_with_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Code of inductor, with dropout, in processes with separate caches."""
    keys = ("precision=bf16", "batch_size=16", "micro_batches=8", "model.compile_lengths=[24, 60]")
    layers = "model.config.n_layer=1" if kind == "classification" else "model.config.num_hidden_layers=1"

    def of(name: str, ranks: int, *overrides: str) -> tuple[str, list[float]]:
        words = (f"strategy.name={name}", layers, *overrides)
        run = tiny(*words) if kind == "classification" else make(tmp_path, kind, *words)
        result = rank_0_of(ranks, steps_of, run, alike=("loss",), timeout_s=LIMIT_S)
        return result["digest"], result["loss"]

    one = of("single", 1, WHOLE, *keys)
    for name, *options in (("ddp",), ("fsdp2", "strategy.options.gather=step"), ("hf_trainer",)):
        assert of(name, 2, WHOLE, *keys, *options) == one, name
    assert of("single", 1, "model.compile=false", *keys[:-1]) != one
