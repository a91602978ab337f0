"""Before the first step a run is compared with plain transformers: planted faults are found and their option is named,
correct runs pass, and nothing is left behind. The export is compared with the run at its end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.export import write_export
from lockstep.checkpoint.export_hashes import damage
from lockstep.config.errors import FAILED
from lockstep.config.run import Run
from lockstep.data import raw_rows
from lockstep.data.job import Job
from lockstep.data.raw_rows import RawRows
from lockstep.distributed import hardware
from lockstep.distributed.world import World
from lockstep.plain import module as plain_module
from lockstep.plain.rows import NotCovered
from lockstep.strategies.engines import blocks
from lockstep.strategies.exact import training_state
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.models import adapters, chunked_loss, quantized, unpadded
from lockstep.tasks.modules import wrapped_module
from lockstep.tasks.task import Task, make_task
from lockstep.training import export_check, plain_check, plain_sides
from lockstep.training.errors import TrainingFailed
from lockstep.training.plain_check import cause, plain_differences
from lockstep.training.plain_sides import sides_of
from lockstep.training.resolve import for_rank
from lockstep.training.session import build_session, join_ranks
from support.family_configs import GROUPED
from support.harness import build, digest, run_on, tiny
from support.marks import slow
from support.messages import raises
from support.own_modules import MEAN, NET, NET_FUNCTIONS, TOY, job
from support.saving import trained
from support.task_runs import TASKS, make

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

ONE = ("strategy.name=single", "launch.processes=1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to add adapters to."""
    run = tiny(*ONE, f"output={tmp_path_factory.mktemp('source')}", "model.config.n_embd=64")
    task, strategy = build(run, World(run))
    return write_export(task, strategy.state.export() or {}, {}, 0)


def on(source: Path, *overrides: str) -> Run:
    """Return a run with an adapter."""
    values = TINY_OF | {"model": {"source": str(source)}, "tokenizer": {"source": str(source)}}
    lora = ("model.adapter.type=lora", "model.adapter.r=4", "model.adapter.target_modules=[c_attn, c_proj]")
    return tiny(*ONE, *lora, *overrides, **values)


TINY_OF: dict[str, Any] = {"name": "adapted"}


def looked_at(run: Run) -> tuple[Task, Strategy, list[plain_check.PlainDifference]]:
    """Return a built run, and the differences found."""
    task, strategy = build(run, World(run))
    return task, strategy, plain_differences(sides_of(task, strategy), strategy)


def blamed(run: Run) -> str:
    """Return the message about a run that must be stopped."""
    task, strategy = build(run, World(run))
    sides = sides_of(task, strategy)
    found = plain_differences(sides, strategy)
    assert found
    for each in found:
        assert "in this run" in str(each)
    return cause(sides, strategy)


# -- correct runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        slow(("precision=bf16",)),
        slow(("data.padding=batch",)),
        slow(("model.attention=eager",)),
        slow(("model.checkpoint_activations=true",)),
        slow(("model.dtype=bfloat16", "precision=bf16")),
        ("task.label_smoothing=0.1",),
        slow(("task.class_weights=balanced",)),
        slow(("task.loss=focal",)),
        ("model.type=bert", "model.config={num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2}"),
        slow(("average.ema=0.9",)),
        slow(("model.freeze=[transformer.wte.*]",)),
    ],
)
def test_a_healthy_classifier_passes(overrides: tuple[str, ...]) -> None:
    assert looked_at(tiny(*ONE, *overrides))[2] == []


_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
_HEADS = {"num_key_value_heads": 2, "max_position_embeddings": 128}
_TEXT = _SMALL | _HEADS | {"head_dim": 16, "layer_types": ["sliding_attention", "sliding_attention"]}
FAMILIES = {
    "ultravbert": {"text_config": _TEXT, "vision_config": _SMALL},  # a sub-config has entries of the family's own
    "phimoe": _SMALL | _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},  # routers draw noise in training
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES])
def test_families_that_were_refused_wrongly_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*ONE, f"model.type={family}", f"model.config={json.dumps(FAMILIES[family])}", "data.max_length=16")
    task, strategy, found = looked_at(run)
    assert found == []
    monkeypatch.setattr(type(task), "loss_sum", scaled(type(task).loss_sum))
    assert plain_differences(sides_of(task, strategy), strategy)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        slow("packed", ()),
        slow("packed", ("task.loss_chunk=8",)),
        slow("packed", ("task.loss_chunk=8", "precision=bf16")),
        ("packed", ("task.attend_across_documents=false",)),
        slow("documents", ()),
        ("prompts", ()),
        slow("prompts", ("model.checkpoint_activations=true", "task.loss_chunk=7")),
    ],
)
def test_a_healthy_language_model_passes_and_so_does_its_export(
    kind: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    run = make(tmp_path, kind, *ONE, *overrides)
    assert looked_at(run)[2] == []
    task, found, folder = exported(run, tmp_path)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees, compared.text
    assert "3 examples" in compared.text


@pytest.mark.parametrize(
    "overrides", [(), *map(slow, [("model.dtype=float32",), ("model.quantization=nf4",), ("precision=bf16",)])]
)
def test_a_healthy_adapter_passes(overrides: tuple[str, ...], source: Path) -> None:
    if "model.quantization=nf4" in overrides:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    assert looked_at(on(source, *overrides))[2] == []


@pytest.mark.parametrize("loss_chunk", [None, 5])
@pytest.mark.parametrize(
    "kind",
    [k if k in ("pairs", "masked") else slow(k) for k in TASKS if k not in ("packed", "documents", "prompts")],
)
def test_every_other_task_passes_and_so_does_its_export(kind: str, loss_chunk: int | None, tmp_path: Path) -> None:
    chunked = () if loss_chunk is None else (f"task.loss_chunk={loss_chunk}",)
    if chunked and kind not in ("translation", "masked", "messages"):
        pytest.skip("the task has no such key")
    run = make(tmp_path, kind, *ONE, *chunked)
    assert looked_at(run)[2] == []
    task, found, folder = exported(run, tmp_path)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees, compared.text
    assert ("3 examples" in compared.text) == (kind not in ("masked", "preference"))


# -- planted faults ----------------------------------------------------------------------------------------------------


def test_a_broken_mask_is_found_and_padding_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*ONE)
    build(run, World(run))  # the trial of the model family comes first
    monkeypatch.setattr(unpadded.RowMap, "_biased", lambda layout, seen: None)
    assert "data.padding" in blamed(run)


def test_a_mask_that_is_a_token_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*ONE)
    build(run, World(run))
    biased = unpadded.RowMap._biased

    def off(layout: Any, seen: Any) -> Any:
        found = biased(layout, seen)
        return None if found is None else found.roll(-1, -1)

    monkeypatch.setattr(unpadded.RowMap, "_biased", off)
    assert "data.padding" in blamed(run)


def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer whose output is a factor of 1.001 too large."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    return wrong


def test_recomputed_layers_with_other_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    again = blocks._again
    monkeypatch.setattr(blocks, "_again", lambda block, forward, *a, **k: again(block, scaled(forward), *a, **k))
    assert "model.checkpoint_activations" in blamed(tiny(*ONE, "model.checkpoint_activations=true"))


def test_compiled_layers_with_other_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "in_training", lambda block, forward: scaled(forward))
    assert "model.compile" in blamed(tiny(*ONE, "model.compile=true"))


def test_a_chunked_loss_with_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = chunked_loss._losses
    monkeypatch.setattr(chunked_loss, "_losses", lambda *a: (losses(*a)[0], losses(*a)[1] * 1.001))
    assert "task.loss_chunk" in blamed(make(tmp_path, "packed", *ONE, "task.loss_chunk=8"))


def test_an_adapter_of_another_scale_is_found(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = adapters.wrap

    def louder(*args: Any) -> Any:
        model = wrap(*args)
        for module in model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):
                scaling["default"] *= 1.01
        return model

    monkeypatch.setattr(adapters, "wrap", louder)
    assert "model.adapter" in blamed(on(source))


def test_a_model_that_changed_since_it_was_built_is_found() -> None:
    run = tiny(*ONE)
    task, strategy = build(run, World(run))
    strategy.model.get_submodule("transformer.h.0.attn").register_forward_hook(
        lambda m, a, found: (found[0] * 1.01, None)
    )
    sides = sides_of(task, strategy)
    assert plain_differences(sides, strategy)
    assert "after it was built" in cause(sides, strategy)


def test_wrong_4_bit_products_are_detected(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    forward = quantized._forward
    monkeypatch.setattr(quantized, "_forward", lambda layer, x: forward(layer, x) * 1.001)
    assert "model.quantization" in blamed(on(source, "model.quantization=nf4"))


def test_a_loss_term_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*ONE, "task.label_smoothing=0.1")
    task, strategy = build(run, World(run))
    vars(task.objective)["options"] = task.objective.options.model_copy(update={"label_smoothing": 0.0})  # type: ignore[attr-defined]
    sides = sides_of(task, strategy)
    assert plain_differences(sides, strategy)[0].what == "the loss"


@pytest.mark.parametrize("shift", [1, -1])
def test_labels_that_are_shifted_are_found(shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = LanguageModeling.collate_at

    def shifted(*args: Any) -> Any:
        micro = collate(*args)
        return replace(micro, targets=micro.targets.roll(shift, 1))

    monkeypatch.setattr(LanguageModeling, "collate_at", shifted)
    assert "No option" in blamed(make(tmp_path, "documents", *ONE))


def test_a_gradient_of_the_other_sign_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*ONE)
    task, strategy = build(run, World(run))
    dict(strategy.model.named_parameters())["transformer.h.0.mlp.c_fc.weight"].register_hook(lambda g: -g)
    sides = sides_of(task, strategy)
    own_numbers = plain_check.own_numbers

    def turned(*args: Any) -> Any:
        found = own_numbers(*args)
        return replace(found, gradient={name: (norm, -along) for name, (norm, along) in found.gradient.items()})

    monkeypatch.setattr(plain_check, "own_numbers", turned)
    assert "along the weight" in plain_differences(sides, strategy)[0].what


def test_different_tokens_are_named() -> None:
    short, run = (tiny(*ONE, f"data.max_length={most}") for most in (8, 32))
    task, strategy = build(short, World(short))
    whole = type(task)(run).opened(task.prepared)  # as a stale cache entry would
    sides = sides_of(whole, strategy)
    assert plain_differences(sides, strategy)
    assert "The tokens of example" in cause(sides, strategy)


def test_half_precision_comparison_still_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing can be computed in float32, the tolerance is the effect of bfloat16 on the plain path."""
    monkeypatch.setattr(plain_check, "takes_float32", lambda *_: False)
    run = tiny(*ONE, "precision=bf16")
    task, strategy = build(run, World(run))
    sides = sides_of(task, strategy)
    assert plain_differences(sides, strategy) == []
    block = strategy.model.get_submodule("transformer.h.0.mlp")
    block.register_forward_hook(lambda module, inputs, found: found * 1.1)
    assert plain_differences(sides, strategy)[0].of.endswith("in bf16")


def checked(run: Run) -> tuple[str, str]:
    """Return the notes before a run's first step, and the reason why it must not start."""
    world = World(run)
    try:
        return plain_check.check(build_session(for_rank(run, world), world), cause), ""
    except TrainingFailed as caught:
        return "", str(caught)
    finally:
        world.close()


def test_a_model_with_nan_outputs_is_named() -> None:
    """No option is blamed: plain transformers computes no number either (for example some Gemma 3n)."""
    run = tiny(*ONE)
    world = World(run)
    session = build_session(for_rank(run, world), world)
    with torch.no_grad():
        session.strategy.model.get_submodule("transformer.ln_f").weight.fill_(torch.nan)
    with raises("LS5170", "Both results are not finite", "nan", error=TrainingFailed):
        plain_check.check(session, cause)
    world.close()


def test_the_first_micro_batch_is_that_of_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tiny(*ONE, "batch_size=8", "micro_batches=2", f"output={tmp_path}")
    groups = list[Any]()
    looked = plain_check.groups_of
    monkeypatch.setattr(plain_check, "groups_of", lambda sides: groups.append((sides, looked(sides))) or looked(sides))
    said, _ = checked(run)
    assert "match plain transformers within rounding (" in said
    world = World(run)
    session = build_session(for_rank(run, world), world)
    rows = session.feed.make(0).micro_batches[0].inputs["input_ids"].tolist()
    sides, found = groups[0]
    for place in found["the first micro-batch"]:
        tokens = sides.examples[place]["input_ids"]
        assert any(row[: len(tokens)] == tokens for row in rows)
    assert len(found["the first micro-batch"]) == plain_check.EXAMPLES
    world.close()


@pytest.mark.parametrize(
    ("raised", "stops"), [(KeyError("nobody foresaw it"), True), (NotCovered("task.name: no"), False)]
)
def test_an_error_of_the_plain_path_names_the_key(
    raised: Exception, stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(plain_check, "batch_loss", fails)
    said, why = checked(tiny(*ONE, f"output={tmp_path}"))
    assert ("KeyError: 'nobody foresaw it'" in why and "verify.plain=false" in why) == stops
    assert ("not compared with a plain computation: task.name: no" in said) != stops


def test_a_tokenizer_that_an_export_would_not_have_is_refused(tmp_path: Path) -> None:
    """transformers loads some families' tokenizers by the family's class, whatever was saved."""
    run = make(tmp_path, "documents", *ONE, "task.samples=0", "model.type=qwen2", f"model.config={json.dumps(GROUPED)}")
    task = make_task(Job.of(run).with_data())
    job = plain_sides.job_of(task)
    examples = job.encode(job.splits["train"])
    with pytest.raises(plain_sides.OtherTokens, match=r"every qwen2 as a Qwen2Tokenizer.*Set tokenizer\.source"):
        plain_sides.check_tokenizer(task, job, examples)
    gpt2 = run.model_copy(update={"model": run.model.model_copy(update={"type": "gpt2", "config": {}})})
    plain_sides.check_tokenizer(type(task)(gpt2).opened(task.prepared), job, examples)


# -- a user's module ---------------------------------------------------------------------------------------------------

SUM = TOY.replace("LOSS", "torch.nn.functional.mse_loss(outputs, answers, reduction='sum')")
EACH = TOY.replace("LOSS", "(outputs - answers).square().mean(-1)")
MODULES = {"mean": (MEAN, ()), "sum": (SUM, ()), "each": (EACH, ()), "net": (NET, NET_FUNCTIONS)}


@pytest.mark.parametrize("kind", ["mean", "net", slow("sum"), slow("each")])
def test_a_module_is_compared_with_its_own_functions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers items that draw random numbers, batch normalization, and batches that are mappings."""
    monkeypatch.syspath_prepend(tmp_path)
    code, functions = MODULES[kind]
    run = job(tmp_path, code, *ONE, functions=functions)
    assert "match your own functions" in checked(run)[0]
    summed = wrapped_module.Calling.summed
    monkeypatch.setattr(wrapped_module.Calling, "summed", lambda self, *a: summed(self, *a) * 1.001)
    said, why = checked(run)
    assert not said
    assert "by your own functions alone" in why
    assert "task.loss" in why


@pytest.mark.parametrize(("twice", "total"), [(1.0, 3.0), (2.0, 1.0), (2**0.5, None)])
def test_divisor_of_a_loss_shows_when_an_item_occurs_twice(
    twice: float, total: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an item twice, a mean of 1 over 3 targets becomes 3, a sum of 1 becomes 1; any other loss is not
    compared."""
    monkeypatch.setattr(plain_module, "_value", lambda job, model, batch, device: torch.tensor(batch[0]))
    batch = {"batch": (1.0, 3), "alone": (1.0, 1), "twice": (twice, 2)}
    if total is None:
        with pytest.raises(NotCovered, match="neither the mean nor the sum"):
            plain_module.batch_loss(None, torch.nn.Linear(1, 1), [batch], "cpu")
    else:
        value, count = plain_module.batch_loss(None, torch.nn.Linear(1, 1), [batch], "cpu")
        assert (float(value), count) == (total, 3)


# -- no side effects ---------------------------------------------------------------------------------------------------


def test_plain_check_leaves_no_state(tmp_path: Path) -> None:
    run = make(tmp_path, "packed", *ONE, "model.checkpoint_activations=true")
    task, strategy = build(run, World(run))

    def state() -> list[Any]:
        modules = [
            (name, module.training, getattr(module, "p", None)) for name, module in strategy.model.named_modules()
        ]
        weights = [(name, p.requires_grad, p.grad is None) for name, p in strategy.model.named_parameters()]
        drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return [digest(strategy.state.state_dict()), modules, weights, drawn, task.run, json.dumps(task.prepared.facts)]

    before = state()
    with plain_check.undrawn(torch.device("cpu")):
        assert plain_differences(sides_of(task, strategy), strategy) == []
    assert state() == before


def test_rows_are_those_that_the_examples_are_of() -> None:
    run = tiny(*ONE)
    task, _ = build(run, World(run))
    kept = RawRows.of(task.prepared.facts)
    assert kept is not None
    assert kept.examples is None
    tokens = task.splits["train"].ragged("input_ids")
    for row, place in zip(kept.rows, kept.at.tolist(), strict=True):
        assert task.tokenizer(row["text"], truncation=True, max_length=32)["input_ids"] == tokens.row(place).tolist()  # type: ignore[attr-defined]


def test_groups_have_what_is_special_about_them() -> None:
    assert raw_rows.groups([5, 9, 2, 9, 7], 3) == {
        "the first examples": [0, 1, 2],
        "the longest example": [1, 2],
        "examples of equal length": [1, 3],
    }
    assert raw_rows.groups([4], 3)["examples of equal length"] == [0, 0]


# -- the export --------------------------------------------------------------------------------------------------------


def exported(run: Run, folder: Path) -> tuple[Task, export_check.Evaluated, Path]:
    run = run.model_copy(update={"output": str(folder)})
    task, strategy = build(run, World(run))
    found = export_check.evaluated(task, strategy)
    return task, found, write_export(task, training_state.export_averaged(strategy) or {}, {}, 0)


@pytest.mark.parametrize(
    "overrides", [(), *map(slow, [("precision=bf16",), ("task.label_smoothing=0.1",), ("average.ema=0.9",)])]
)
def test_a_healthy_export_passes(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = tiny(*ONE, *overrides)
    task, found, folder = exported(run, tmp_path)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees
    assert "3 examples" in compared.text


def test_an_export_that_a_container_has_no_memory_for_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = hardware.Sources(tmp_path, tmp_path / "cgroup")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8000000 kB\n")
    (tmp_path / "cgroup/job/step").mkdir(parents=True)
    (tmp_path / "cgroup/job/memory.max").write_text("1000")
    monkeypatch.setattr(hardware, "memory_limit", partial(hardware.memory_limit, sources))
    run = tiny(*ONE)
    task, found, folder = exported(run, tmp_path / "out")
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees
    assert "this machine has too little memory to load it" in compared.text


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_a_healthy_adapter_is_exported(export: str, source: Path, tmp_path: Path) -> None:
    run = on(source, f"model.adapter.export={export}")
    task, found, folder = exported(run, tmp_path)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees, compared.text
    assert "3 examples" in compared.text


@pytest.mark.extras
def test_scores_of_an_export_are_compared(tmp_path: Path) -> None:
    """scikit-learn's scores of the export's outputs are compared with the run's own evaluation."""
    pytest.importorskip("sklearn", reason="needs the extra compared")
    run = tiny(*ONE)
    task, found, folder = exported(run, tmp_path)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert "all together its accuracy, macro_f1" in compared.text
    wrong = replace(found, scores=found.scores | {"accuracy": found.scores["accuracy"] / 2 + 0.1})
    compared = export_check.compare_export(task, wrong, folder, torch.device("cpu"))
    assert not compared.agrees
    assert "but other scores: accuracy" in compared.text


@pytest.mark.extras
def test_scored_pairs_of_a_large_train_split_are_compared(tmp_path: Path) -> None:
    """Correlations are over all compared pairs, even if train has more rows than any evaluated split."""
    pytest.importorskip("scipy", reason="needs the extra compared")
    run = make(tmp_path, "pairs", *ONE, "task.negative=null", "task.score=score", "task.score_range=[0,4]")
    task, found, folder = exported(run, tmp_path / "out")
    assert len(task.splits["train"]) > len(task.splits["validation"])
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert compared.agrees, compared.text
    assert "all together its pearson, spearman" in compared.text


@pytest.mark.extras
def test_a_score_that_rounding_moves_is_not_compared(tmp_path: Path) -> None:
    """The order of equally scored answers is ignored; a loss that differs from the run's is still reported."""
    pytest.importorskip("sklearn", reason="needs the extra compared")
    run = tiny(*ONE)
    task, found, folder = exported(run, tmp_path)
    weights = load_file(folder / "model.safetensors")
    alike = {
        name: w[:1].expand_as(w) if name.startswith("score") else w for name, w in weights.items()
    }  # all labels have equal scores
    job, model = export_check.loaded_job(task, folder), export_check.loaded(task, folder)
    wrong = [(name, 1 - theirs, theirs) for name, _, theirs in export_check._scored(job, model, found)]
    assert export_check._other_scores(job, model, found, wrong)  # control
    model.load_state_dict(alike, strict=False)
    assert "accuracy" in export_check._unstable_scores(job, model, found)


def other_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] *= 1.1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_tokens(folder: Path) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    told["normalizer"] = {"type": "Replace", "pattern": {"String": "i"}, "content": "e"}
    (folder / "tokenizer.json").write_text(json.dumps(told))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("change", [other_weight, other_tokens, no_weights])
def test_an_export_that_is_another_model_is_an_error(change: Callable[[Path], None], tmp_path: Path) -> None:
    run = tiny(*ONE, "data.max_length=16")
    task, found, folder = exported(run, tmp_path)
    change(folder)
    compared = export_check.compare_export(task, found, folder, torch.device("cpu"))
    assert not compared.agrees
    assert str(folder) in compared.text


# -- a full run --------------------------------------------------------------------------------------------------------


def test_a_run_whose_export_is_wrong_is_not_finished(tmp_path: Path) -> None:
    """No command accepts such an export as finished, and the same command writes it again."""
    run = tiny(*ONE, "steps=2", "checkpoint.every=1", f"output={tmp_path / 'out'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_check, "exported_losses", lambda *_: ([1.0, 2.0, 3.0], 0.0))  # of three examples
        status, said = trained(run)
    assert (status, "the export is not the trained model" in said) == (FAILED, True)
    assert damage(run.folder) == "export.json is missing"
    status, said = trained(run)
    assert status == 0, said
    assert "has this run's losses for 3 examples" in (run.folder / "log.txt").read_text()
    assert damage(run.folder) is None


def started(world: World, run: Run, broken: bool) -> tuple[str, bool]:
    """Return the notes of a rank before its first step, and whether it may start."""
    job = for_rank(run, world)
    join_ranks(job, world)
    session = build_session(job, world)
    if broken:
        unpadded.RowMap._biased = lambda layout, seen: None  # wrong on purpose
    try:
        return plain_check.check(session, cause), True
    except TrainingFailed as caught:
        return str(caught), False


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "pipeline"])
def test_every_rank_learns_of_the_difference(strategy: str) -> None:
    run = tiny(f"strategy.name={strategy}", "launch.processes=2")
    found = run_on(2, started, run, False, joined=False)
    assert found == [found[0]] * 2
    assert found[0][1]
    assert "match plain transformers" in found[0][0]


@pytest.mark.processes
def test_every_rank_is_stopped_and_a_key_leaves_it_out() -> None:
    run = tiny("strategy.name=ddp", "launch.processes=2")
    found = run_on(2, started, run, True, joined=False)
    assert [goes_on for _, goes_on in found] == [False, False]
    assert all("data.padding" in text and "Nothing was trained" in text for text, _ in found)
    run = tiny("strategy.name=ddp", "launch.processes=2", "verify.plain=false")
    assert (
        run_on(2, started, run, True, joined=False)
        == [("not compared with a plain computation (verify.plain is false)", True)] * 2
    )


@pytest.mark.parametrize("chunk", [7, 2**16])
def test_sums_of_a_gradient_do_not_depend_on_the_chunks_by_more_than_rounding(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.Generator().manual_seed(0)
    gradient, weight = (torch.randn(40, 25, generator=drawn) for _ in range(2))
    monkeypatch.setitem(plain_check.CHUNK, "cpu", chunk)
    of_gradient, product, of_weight = plain_check._sums(gradient, weight).tolist()
    assert of_gradient == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)
    assert product == pytest.approx(float((gradient.double() * weight.double()).sum()), rel=1e-12)
    assert of_weight == pytest.approx(float(weight.double().square().sum()), rel=1e-12)
