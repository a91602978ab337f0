"""Traced scripts in which a library behaves unexpectedly (`tests/assumptions/`): no correct one has a finding, and a
comparison names what the library changed."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from lockstep_trace import tracer
from lockstep_trace.compare_traces import compare_traces
from lockstep_trace.findings import findings
from lockstep_trace.read import Trace, read
from lockstep_trace.tracer import Settings, engines
from lockstep_trace.tracer.hooks import Hooks

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def train(model: Any, labels: int, between: Callable[[int], None] = lambda step: None) -> None:
    """Train on drawn tokens; the labels are the tokens, or below `labels`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for step in range(6):
        ids = torch.randint(0, 32, (4, 8))
        optimizer.zero_grad()
        model(input_ids=ids, labels=torch.randint(0, labels, (4,)) if labels else ids).loss.backward()
        optimizer.step()
        between(step)


def traced(folder: Path, script: Callable[[], None]) -> Trace:
    torch.manual_seed(0)
    tracer.begin(Settings(str(folder)))
    try:
        script()
    finally:
        tracer.end()
    trace = read(folder)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    return trace


def test_an_adapter_that_is_merged_to_evaluate_and_taken_out(tmp_path: Path) -> None:
    """It leaves other last bits in the frozen weights: no finding, the same training to rounding, and with --exact the
    first difference is one of rounding, whether gradients or losses show it first."""
    peft: Any = pytest.importorskip("peft")

    def script(merges: bool, layer: str) -> Callable[[], None]:
        def run() -> None:
            config = peft.LoraConfig(r=2, target_modules=[layer], init_lora_weights=False, task_type="CAUSAL_LM")
            model = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config)

            def evaluate(step: int) -> None:
                if merges and step % 3 == 2:
                    model.merge_adapter()
                    model.unmerge_adapter()

            train(model, 0, evaluate)

        return run

    firsts = set()
    for layer in ("q_proj", "down_proj"):
        whole, merged = (traced(tmp_path / f"{m} {layer}", script(m, layer)) for m in (False, True))
        assert findings(merged) == []
        assert compare_traces(whole, merged).first is None
        exact = compare_traces(whole, merged, exact=True)
        firsts.add(exact.first)
        assert "only by rounding" in exact.cause
        assert exact.step == 3
    assert firsts == {"gradient", "loss"}


def test_a_frozen_head_that_is_adapted_is_not_named(tmp_path: Path) -> None:
    """all-linear without a task type adapts a classifier's head that was drawn at random and stays frozen. A trace has
    trained weights alone: it does not say so, and accuses of nothing else (`init --from` refuses such a script)."""
    peft: Any = pytest.importorskip("peft")

    def script() -> None:
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(**SIZES, **off))
        train(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")), 2)

    trace = traced(tmp_path, script)
    assert findings(trace) == []
    names = {p.name for s in trace.ranks[0].steps[0].values() for p in s.layout.parameters}
    assert {n.rpartition("classifier.")[2] for n in names if "classifier" in n} == {
        "lora_A.default.weight",
        "lora_B.default.weight",
    }


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("write", [lambda weight: weight.mul_(0.5), lambda weight: torch._foreach_mul_([weight], 0.5)])
def test_writes_to_weights_of_fsdp2_are_seen(alone: None, tmp_path: Path, write: Callable[[Any], object]) -> None:
    """A write to a DTensor counts in its own version, not in that of its part, and one of a `_foreach` function in
    neither: other code than the optimizer was not seen to write to sharded weights."""
    from torch.distributed.fsdp import fully_shard

    def script() -> None:
        model = nn.Linear(4, 8)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
            optimizer.step()
            with torch.no_grad():
                write(model.weight)

    assert findings(traced(tmp_path, script)) == []


def test_the_norm_of_fsdp2_is_recorded_as_a_number(alone: None, tmp_path: Path) -> None:
    """clip_grad_norm_ returns a DTensor, which float() reads and formatting does not."""
    from torch.distributed.fsdp import fully_shard

    norms: list[float] = []

    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        for part in (model[0], model[2], model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(TypeError, match="__format__"):
                f"{norm:.3f}"
            norms.append(float(norm))
            optimizer.step()

    trace = traced(tmp_path, script)
    assert [f for f in findings(trace) if f.level != "info"] == []
    for step, norm in enumerate(norms):
        square = sum(value.square for value in trace.ranks[0].steps[0][step].unclipped.values())
        assert square**0.5 == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_that_accelerate_does_not_know_is_to_look_at(tmp_path: Path, prepared: bool) -> None:
    state = pytest.importorskip("accelerate.state")
    from accelerate import Accelerator

    def script() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = accelerator.prepare(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer) if prepared else optimizer
        for _ in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))))
                optimizer.step()
                optimizer.zero_grad()

    try:
        codes = {f.code for f in findings(traced(tmp_path, script))}
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    assert ("step-while-accumulating" in codes) is not prepared


@pytest.mark.parametrize("own", [True, False])
def test_a_column_that_trainer_removes_and_a_loss_names_is_to_look_at(tmp_path: Path, own: bool) -> None:
    state = pytest.importorskip("accelerate.state")
    datasets = pytest.importorskip("datasets")
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss * inputs["weight"].sum()

    model = BertForSequenceClassification(BertConfig(**SIZES))
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 4, "labels": [0, 1] * 2, "weight": [1.0] * 4})

    def script() -> None:
        arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
        (Weighted if own else Trainer)(model, arguments, train_dataset=rows).get_train_dataloader()
        train(model, 2)

    try:
        codes = {f.code for f in findings(traced(tmp_path / "trace", script))}
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    assert ("column-removed" in codes) is own


@pytest.mark.parametrize("fails", [False, True])
def test_library_that_triggers_the_trace_is_patched_after_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """`from transformers import Trainer` in a script's first line, for one: torch is imported while Trainer is not."""
    hooks = Hooks()
    for name, value in (("ENGINE", "no_engine"), ("LOADS", "no_loads"), ("SELECTORS", {})):
        monkeypatch.setattr(engines, name, value)
    monkeypatch.setattr(engines, "EVALUATORS", {"half": ("Trainer", "evaluate")})
    monkeypatch.setattr(engines, "begin_here", lambda: engines.watch(hooks), raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    body = "from lockstep_trace.tracer import engines\nengines.begin_here()\n"
    body += "class Trainer:\n    def evaluate(self):\n        return {}\n" + ("1 / 0\n" if fails else "")
    (tmp_path / "half.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        half = importlib.import_module("half")
        assert hasattr(half.Trainer.evaluate, "__wrapped__")
        assert type(half.__spec__) is ModuleSpec
    sys.modules.pop("half", None)
