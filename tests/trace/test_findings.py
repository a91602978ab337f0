"""Findings of one trace: each fault is proved, and its healthy neighbours are accused of nothing."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep_trace
from lockstep_trace import tracer
from lockstep_trace.findings import LIKELY as LIKELY_CODES
from lockstep_trace.findings import findings, likely, proved
from lockstep_trace.read import OptimizerLayout, Parameter, Rank, Step, Trace, Value, read
from lockstep_trace.rules import data, gradients, inputs, modes, observed, replicas, schedules
from lockstep_trace.terminal import suspected
from lockstep_trace.tracer import Settings, evidence, graph, lifetimes
from lockstep_trace.tracer.statements import without_effect
from support.answer_cases import ANSWERS, ANSWERS_SUSPECTED, NEAR_ANSWERS, a_decoder_of_its_targets
from support.contradiction_cases import CONTRADICTIONS, UNUSUAL
from support.evidence_cases import (
    EVIDENCE,
    EVIDENCE_SUSPECTED,
    NEAR_EVIDENCE,
    a_reference_that_is_the_policy,
    a_term_of_weight_zero,
)
from support.given_cases import GIVEN, GIVEN_SUSPECTED, NEAR_GIVEN
from support.layer_cases import LAYERS, LAYERS_SUSPECTED
from support.noise_cases import NOISE, NOISE_SUSPECTED, SIMILAR
from support.proved_cases import CLOSE, LIKELY, PROVED
from support.right_cases import (
    RIGHT_ON_PURPOSE,
    a_layer_that_leaves_the_optimizer,
    a_momentum_encoder_with_batch_norm,
)
from support.state_cases import STATE, STATE_SUSPECTED
from support.suspected_cases import SUSPECTED as SUSPECTED_CASES
from support.traced_cases import PAIRS as PAIRED_CASES
from support.traced_cases import RIGHT, a_stream_of_workers, batches, net, no_target_that_counts, sgd
from support.update_cases import NEAR_UPDATES, UPDATES, UPDATES_SUSPECTED

PAIRS = PAIRED_CASES | PROVED | CONTRADICTIONS | LAYERS | NOISE | STATE | ANSWERS | UPDATES | EVIDENCE | GIVEN
SUSPECTED = (
    SUSPECTED_CASES
    | LIKELY
    | LAYERS_SUSPECTED
    | NOISE_SUSPECTED
    | STATE_SUSPECTED
    | ANSWERS_SUSPECTED
    | UPDATES_SUSPECTED
    | EVIDENCE_SUSPECTED
    | GIVEN_SUSPECTED
)
CASES = [pytest.param(c, marks=pytest.mark.processes if c is a_stream_of_workers else ()) for c in PAIRS]


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_faults_are_proved_and_healthy_lookalikes_are_not_accused(
    tmp_path: Path, case: Callable[[bool], None], wrong: bool
) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case(wrong)
    tracer.end()
    trace = read(tmp_path)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    assert {f.code for f in proved(findings(trace))} == ({PAIRS[case]} if wrong else set())


@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize("case", SUSPECTED, ids=lambda case: case.__name__)
def test_faults_are_suspected_and_healthy_lookalikes_are_not(
    tmp_path: Path, case: Callable[[bool], None], wrong: bool
) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case(wrong)
    tracer.end()
    trace = read(tmp_path)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    rows = [f for f in findings(trace) if f.level != "info"]
    assert {(f.code, f.level) for f in rows} == ({(SUSPECTED[case], "suspicious")} if wrong else set())
    lines = suspected(rows, [])
    assert bool(lines) == bool(likely(rows))
    assert "suspicious" not in "".join(lines)
    by_default = wrong and (SUSPECTED[case] in LIKELY_CODES or any(f.likely for f in rows))
    assert lines[:1] == (["to look at; it may be intended:"] if by_default else [])


@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize(
    ("case", "code"),
    [
        (a_decoder_of_its_targets, "answer-in-input"),
        (a_reference_that_is_the_policy, "reference-is-policy"),
        (a_term_of_weight_zero, "reference-is-policy"),
    ],
)
def test_faults_beside_parts_without_a_gradient_are_suspected(
    tmp_path: Path, case: Callable[[bool], None], code: str, wrong: bool
) -> None:
    """A part of these models gets no gradient in either case."""
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case(wrong)
    tracer.end()
    codes = {(f.code, f.level) for f in findings(read(tmp_path)) if f.level != "info"} - {("no-gradient", "suspicious")}
    assert codes == ({(code, "suspicious")} if wrong else set())


def test_layers_that_leave_the_optimizer_or_are_updated_by_hand_are_not_suspected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    a_layer_that_leaves_the_optimizer()
    tracer.end()
    assert "in-no-optimizer" not in {f.code for f in findings(read(tmp_path))}


@pytest.mark.parametrize(
    "case",
    [*RIGHT, *CLOSE, *UNUSUAL, *SIMILAR, *RIGHT_ON_PURPOSE, *NEAR_ANSWERS, *NEAR_UPDATES, *NEAR_GIVEN, *NEAR_EVIDENCE],
    ids=lambda case: case.__name__,
)
def test_right_programs_of_unusual_styles_are_not_accused(tmp_path: Path, case: Callable[[], None]) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case()
    tracer.end()
    trace = read(tmp_path)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    assert proved(findings(trace)) == []


def test_batch_norms_of_a_momentum_encoder_are_not_frozen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    a_momentum_encoder_with_batch_norm()
    tracer.end()
    assert findings(read(tmp_path)) == []


def test_a_parameter_that_one_of_two_optimizers_trains_is_not_untrained(tmp_path: Path) -> None:
    """Both hold the body and two heads, as in InfoGAN, and the third head is trained by neither."""
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])
    model = nn.ModuleDict({"body": nn.Linear(12, 8), "heads": heads})
    optimizers = [sgd(model) for _ in range(2)]
    for x, y in batches():
        for head, optimizer in zip(heads, optimizers, strict=False):
            optimizer.zero_grad()
            functional.cross_entropy(head(model["body"](x).relu()), y).backward()
            optimizer.step()
    tracer.end()
    texts = [each.what for each in findings(read(tmp_path)) if each.code == "no-gradient"]
    assert [text.rpartition("(")[2] for text in texts] == ["2 of 8)"] * 2


@pytest.mark.parametrize("status", [0, 1])
def test_an_optimizer_of_a_failed_run_may_have_made_no_step(tmp_path: Path, status: int) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    body, head = nn.Linear(12, 8), nn.Linear(8, 3)
    optimizer = sgd(body)
    for x, y in list(batches())[:2]:
        optimizer.zero_grad()
        functional.cross_entropy(head(body(x).relu()), y).backward()
        optimizer.step()
    tracer.end()
    trace = read(tmp_path)
    trace = replace(trace, about={**trace.about, "status": status})
    rows = [each for each in findings(trace) if each.code == "in-no-optimizer"]
    assert [each in likely(rows) for each in rows] == [status == 0]


def test_a_closure_gets_the_arguments_of_its_optimizer(tmp_path: Path) -> None:
    """As in an optimizer that evaluates the loss twice, and tells the closure which time it is (SAM)."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = closure(first=True)
            closure(first=False)
            super().step()
            return loss

    times: list[bool] = []
    tracer.begin(Settings(str(tmp_path)))
    model = net()
    optimizer = Twice(model.parameters(), 0.1)
    for x, y in list(batches())[:4]:

        def closure(first: bool, x: Any = x, y: Any = y) -> Any:
            times.append(first)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    tracer.end()
    assert times == [True, False] * 4
    assert len(read(tmp_path).steps(0)) == 4


def test_a_trace_looks_at_losses_that_an_earlier_one_has_left(tmp_path: Path) -> None:
    graph.WITHOUT["Mean",] = graph.LOOKED_AT
    tracer.begin(Settings(str(tmp_path)))
    tracer.end()
    assert not graph.WITHOUT


def accumulated(accelerator: Any, gradient_accumulation_steps: int) -> int | None:
    """A function of a script."""
    return lifetimes.unset_accumulation() or accelerator.accumulate


def test_a_setting_that_accelerate_is_not_given_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    for count, own, ranks, noted in ((4, 1, 1, 4), (1, 1, 1, None), (4, 4, 1, None), (4, 1, 4, None)):
        values = {"gradient_accumulation_steps": own, "num_processes": ranks, "accumulate": None, "step": 2}
        accelerator = type("Accelerator", (), values)()
        assert accumulated(accelerator, count) == noted
        if noted:
            assert accumulated(type("Other", (), values)(), count) is None
            accelerator.step = 0  # the name is of another function
            assert accumulated(accelerator, count) is None


@dataclass
class Arguments:
    gradient_accumulation_steps: int = 4


def of_arguments(accelerator: Any, arguments: Arguments, defaults: type[Arguments] = Arguments) -> int | None:
    return lifetimes.unset_accumulation() or accelerator.accumulate


def test_a_default_that_the_script_replaces_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    values = {"gradient_accumulation_steps": 1, "num_processes": 1, "accumulate": None, "step": 2}
    accelerator = type("Accelerator", (), values)()
    assert of_arguments(accelerator, Arguments(1)) is None
    assert of_arguments(accelerator, Arguments()) == 4


def test_a_nan_in_each_step_is_not_reported_as_zeroed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    no_target_that_counts(True)
    tracer.end()
    (finding,) = proved(findings(read(tmp_path)))
    assert "the loss is nan in each of them, and no target counts" in finding.what
    assert "no target counts: every label is ignored" in finding.cause


@pytest.mark.parametrize(
    ("contents", "constant", "proved_"),
    [([7, 7], False, True), ([7, 8], False, False), ([7, 7], True, False)],
)
def test_equally_initialized_shards_are_a_finding(contents: list[int], constant: bool, proved_: bool) -> None:
    """The controls: other numbers, and constants."""
    names = ("a.weight", "b.weight")
    ranks = []
    for number, content in enumerate(contents):
        rank = Rank({"rank": number, "world": 2}, Path())
        rows = [Parameter(n, (4, 2), (2 * number, 0), (2, 2), 257, "float32", "cpu", 0, True, True, "") for n in names]
        rank.starts[0] = OptimizerLayout("SGD", tuple(rows), (), False, None, ("M",)), {}
        rank.shards[0] = {n: (content + i, constant) for i, n in enumerate(names)}
        ranks.append(rank)
    rows_ = [*replicas.equal_shards(Trace(Path(), {}, tuple(ranks), 0), 0)]
    assert [f.code for f in proved(rows_)] == (["equal-shards"] if proved_ else [])


@pytest.mark.parametrize(
    ("by", "whole", "proved_"), [((0.5, 0.8), False, True), ((0.5, 0.5), False, False), ((0.5, 0.8), True, False)]
)
def test_shards_that_a_script_scales_by_other_factors_are_a_finding(
    by: tuple[float, float], whole: bool, proved_: bool
) -> None:
    """The controls: one factor, and experts that are scaled by themselves."""
    size = (4, 2) if whole else (2, 2)
    ranks = []
    for number, factor in enumerate(by):
        rows = [Parameter(n, (4, 2), (0, 0), (2, 2), 1, "float32", "cpu", 0, True, True, "") for n in ("a", "b")]
        rows.append(Parameter("c", (4, 2), (0, 0), size, 1, "float32", "cpu", 0, True, True, ""))
        layout = OptimizerLayout("SGD", tuple(rows), (), False, None, ("M",))
        rank = Rank({"rank": number, "world": 2}, Path())
        for at in range(3):
            step = Step({"step": at}, layout)
            vars(step)["arrived"] = {n: Value(0, 4.0) for n in "abc"}
            scales = {"a": factor, "b": factor, "c": 1.0 if whole else factor}
            vars(step)["grads"] = {n: Value(0, 4.0 * x**2) for n, x in scales.items()}
            rank.steps.setdefault(0, {})[at] = step
        ranks.append(rank)
    rows_ = [*gradients.clipping(Trace(Path(), {}, tuple(ranks), 0), 0)]
    assert [f.code for f in proved(rows_)] == (["clip-own-shards"] if proved_ else [])


@pytest.mark.parametrize(("rows", "codes"), [(range(60, 120), []), (range(40, 100), ["parts-overlap"])])
def test_fixed_parts_of_replicas_that_share_examples_are_suspected(rows: range, codes: list[str]) -> None:
    ranks = []
    for number, part in enumerate([range(60), rows]):
        rank = Rank({"rank": number, "world": 2}, Path(), ended={"steps": [12]})
        rank.models.append({"name": "M", "group": {"ranks": 2, "hooked": False, "ignored": []}})
        rank.starts[0] = layout, _ = OptimizerLayout("SGD", (), (), False, None, ("M",)), {}
        steps = {at: Step({"step": at, "examples": list(map(str, part))[at % 6 :: 6]}, layout) for at in range(12)}
        rank.steps[0] = steps
        ranks.append(rank)
    findings_ = [*inputs.overlapping(Trace(Path(), {}, tuple(ranks), 0), 0)]
    assert [(f.code, f.level) for f in findings_] == [(code, "suspicious") for code in codes]


@pytest.mark.parametrize("overlap", [0, 96])
def test_workers_that_shuffle_a_stream_each_are_suspected(overlap: int) -> None:
    rank, name = Rank({"rank": 0, "world": 1}, Path()), "1.0"
    rank.loaders.append({"loader": name, "streamed": True, "workers": 2})
    layout = OptimizerLayout("SGD", (), (), False, None, ("M",))
    orders = [torch.randperm(96) + (96 - overlap) * worker for worker in range(2)]
    rank.steps[0] = {}
    for at in range(16):
        rows = [str(int(i)) for i in orders[at % 2].split(12)[at // 2]]
        rank.steps[0][at] = Step({"step": at, "examples": rows, "micro": [12], "fed": [[name, at]]}, layout)
    rows_ = [*data.whole_stream(Trace(Path(), {}, (rank,), 0))]
    assert [(f.code, f.level) for f in rows_] == ([("whole-stream", "suspicious")] if overlap else [])


@pytest.mark.parametrize("way", ["without the offset", "with it", "own candidates first"])
def test_targets_of_gathered_candidates_need_the_place_of_the_rank(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    ranks = []
    for number in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda number=number: number)
        model, rank = nn.Linear(3, 5), Rank({"rank": number, "world": 2}, Path())
        for at in range(3):
            own = nn.functional.normalize(model(torch.rand(4, 3)), dim=-1)
            parts = [torch.rand(4, 5), torch.rand(4, 5)]
            place = 0 if way == "own candidates first" else number
            parts[place] = own
            targets = torch.arange(4) + (4 * number if way == "with it" else 0)
            loss = nn.functional.cross_entropy(own @ torch.cat(parts).T / 0.1, targets)
            (function,) = graph.objectives(loss)
            assert function.targets is not None
            about = function.about | {"diagonal": bool(function.targets[4])}
            assert about["gathered"] == [4, 8, place]
            layout = OptimizerLayout("SGD", (), (), False, None, ("M",))
            record = {"step": at, "objectives": [about], "examples": [f"{number}.{at}"]}
            rank.steps.setdefault(0, {})[at] = Step(record, layout)
        ranks.append(rank)
    rows = [*modes.contrastive(Trace(Path(), {}, tuple(ranks), 0), 0)]
    assert [f.code for f in proved(rows)] == (["labels-without-offset"] if way == "without the offset" else [])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_an_absolute_loss_of_torch_that_spreads_is_noted() -> None:
    layer, targets = nn.Linear(3, 1), torch.randn(8)
    outputs = layer(torch.randn(8, 3))
    losses_ = [functional.l1_loss(outputs, targets), functional.l1_loss(outputs.squeeze(1), targets)]
    losses_.append(functional.l1_loss(outputs, targets.unsqueeze(1)))
    notes = [[note for note, _ in evidence._all_pairs(loss, 8, [])] for loss in losses_]
    assert notes == [[("all pairs", "8")], [], []]


def test_a_graph_is_read_through_the_hooks_of_modules() -> None:
    """The node of a full backward hook, BackwardHookFunctionBackward, has no name before its suffix."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    model.register_full_backward_hook(lambda *_: None)
    loss = model(torch.rand(2, 3, requires_grad=True)).mean()
    names = [graph.name_of(node) for node in graph.nodes_of(loss, graph.NODES)]
    assert names[:3] == ["Mean", "", "Addmm"]
    assert "Relu" in names


def test_class_weights_of_a_loss_are_read_with_targets_of_bytes() -> None:
    targets = (torch.arange(64) < 48).to(torch.uint8)
    loss = functional.cross_entropy(torch.rand(64, 2, requires_grad=True), targets, torch.tensor([1.0, 3.0]))
    assert {note: bool(holds) for note, holds in evidence._classes(loss.grad_fn, 64, {})} == {
        ("frequent weighs", ""): True
    }


@pytest.mark.parametrize("way", ["zeroed", "zeroed in place", "cut", "two factors of zeros"])
def test_the_cause_of_zero_gradients_is_not_guessed(way: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    if way == "two factors of zeros":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, folder=tmp_path):
        for _ in range(4):
            outputs = model(torch.rand(8, 5))
            outputs = outputs.detach().requires_grad_() if way == "cut" else outputs
            nn.functional.mse_loss(outputs, torch.rand(8, 3)).backward()
            if way.startswith("zeroed"):
                optimizer.zero_grad(set_to_none=way == "zeroed")
            optimizer.step()
            optimizer.zero_grad()
    (found,) = findings(read(tmp_path))
    assert found.code == "all-zero"
    assert ("zeroed between backward and step" in found.cause) is way.startswith("zeroed"), found.cause
    assert ("the loss does not depend on them" in found.cause) is not way.startswith("zeroed")


@pytest.mark.parametrize(
    ("metric", "mode", "values", "proved_"),
    [
        ("mae", "max", (0.5, 2.0), True),
        ("val_acc", "min", (0.5, 0.9), True),
        ("eval_loss", "min", (0.5, 2.0), False),
        ("neg_mae", "max", (0.5, 2.0), False),
        ("nll", "max", (-0.5, 2.0), False),  # turned round, or a density
        ("error_acc", "max", (0.5, 2.0), False),
        ("reward", "min", (0.5, 2.0), False),
        ("1-acc", "min", (0.5, 0.9), False),
        ("forget_accuracy", "min", (0.5, 0.9), False),  # what is to be unlearned
        ("recall@10", "min", (0.5, 0.9), True),
    ],
)
def test_the_largest_error_as_the_best_is_a_finding(
    metric: str, mode: str, values: tuple[float, ...], proved_: bool
) -> None:
    rank = Rank({"rank": 0, "world": 1}, Path())
    rank.selections += [{"by": "Trainer", "metric": metric, "mode": mode, "value": v} for v in values]
    rows = [*schedules.wrong_way(Trace(Path(), {}, (rank,), 0))]
    assert [f.code for f in proved(rows)] == (["best-is-worst"] if proved_ else [])


@pytest.mark.parametrize("own", [True, False], ids=["trainer", "loop"])
def test_a_trainer_does_not_divide_a_loss_of_the_script(tmp_path: Path, own: bool) -> None:
    """The control: a loop of one's own, which may mean the sum."""

    class Own:
        def compute_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(model(x), y, label_smoothing=0.1)

    code = "def training_step(self, x, y):\n    (self.compute_loss(x, y) / 1).backward()"
    functions: dict[str, Any] = {"__name__": "transformers.trainer" if own else "trainer"}
    exec(code, functions)
    model = net()
    optimizer = sgd(model)
    tracer.begin(Settings(str(tmp_path)))
    for i, (x, y) in enumerate(batches()):
        functions["training_step"](Own(), x, y)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    tracer.end()
    rows = findings(read(tmp_path))
    assert [(f.code, f.level) for f in rows] == [("accumulation-undivided", "wrong" if own else "suspicious")]


@pytest.mark.parametrize(
    ("ends", "whole", "size", "level"),
    [(1, 1, 32, "wrong"), (0, 1, 32, "suspicious"), (1, 0, 32, "suspicious"), (1, 1, 64, "suspicious")],
)
def test_workers_that_each_yield_the_whole_data_set_are_a_finding(ends: int, whole: int, size: int, level: str) -> None:
    """In orders of their own. The controls: a stream without end, a worker that yields a few rows more, and a stream
    that is to yield all rows twice."""
    rank = Rank({"rank": 0, "world": 1}, Path())
    rank.loaders.append({"loader": "1.0", "workers": 2, "streamed": True, "size": size})
    rank.passed += [{"loader": "1.0"}] * ends
    layout = OptimizerLayout("SGD", (), (), False, None, ("M",))
    for number in range(16):
        part = range(4 * (number // 2), 4 * (number // 2) + 4)
        rows = [f"{n if number % 2 else (n + 12) % (32 if whole else 36)}" for n in part]
        about = {"step": number, "fed": [["1.0", number]], "examples": rows, "micro": [4]}
        rank.steps.setdefault(0, {})[number] = Step(about, layout)
    found = [*data.whole_stream(Trace(Path(), {}, (rank,), 0))]
    assert [(f.code, f.level) for f in found] == [("whole-stream", level)]


@pytest.mark.parametrize(("rows", "codes"), [(([1, 7], [2, 7]), ["wrong"]), (([1, 7], [2, 8]), ["suspicious"])])
def test_different_splits_on_ranks_are_a_finding(rows: tuple[list[int], list[int]], codes: list[str]) -> None:
    """The controls: other data on each rank, and equal parts."""
    ranks = []
    for number, row in enumerate(rows):
        rank = Rank({"rank": number, "world": 2}, Path())
        rank.models.append({"name": "M", "group": {"ranks": 2, "hooked": False, "ignored": []}})
        rank.loaders.extend({"split": [0, part], "rows": [row[0] + part, row[1]]} for part in (0, 1))
        ranks.append(rank)
    assert [f.level for f in observed.split_apart(Trace(Path(), {}, tuple(ranks), 0))] == codes
    assert not [*observed.split_apart(Trace(Path(), {}, (ranks[0], ranks[0]), 0))]
    about, layout = {"step": 0, "fed": [["a", 0], ["b", 0]]}, OptimizerLayout("SGD", (), (), False, None, ("M",))
    for rank in ranks:  # both parts are trained on
        for name, loader in zip("ab", rank.loaders, strict=True):
            loader["loader"] = name
        rank.steps.setdefault(0, {})[0] = Step(about, layout)
    assert not [*observed.split_apart(Trace(Path(), {}, tuple(ranks), 0))]


def test_statements_without_effect_are_named_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets have `add`, and properties need no call."""
    right = "for p in model.parameters():\n    p.data.clamp_(0, 1)\nseen.data.add(3)\ndata.train\nmodel.eval()\n"
    right += "try:\n    a.set_epoch\nexcept AttributeError:\n    pass\nfor s, p in zip(t, m.parameters()):\n s.add(p)\n"
    wrong = "for p in model.parameters():\n    p.data.clamp(0, 1)\nmodel.eval\nopt.zero_grad\ntorch.no_grad()\n"
    for text, count in ((right, 0), (wrong, 4)):
        (tmp_path / "job.py").write_text(text)
        monkeypatch.setattr("sys.argv", [str(tmp_path / "job.py")])
        assert len(without_effect()) == count
    rank = Rank({"rank": 0, "world": 1}, Path(), ended={"idle": without_effect()})
    assert {f.level for f in observed.statements(Trace(Path(), {}, (rank,), 0))} == {"wrong"}


def _ranks(optimizers: tuple[int, int], collectives: dict[str, list[int]], outside: dict[str, bool]) -> Trace:
    """Return a trace of two ranks with five steps, of one and two optimizers."""
    ranks = []
    for number, count in enumerate(optimizers):
        rank = Rank({"rank": number, "world": 2}, Path(), ended={"steps": [5] * count})
        for o in range(count):
            rows = (Parameter(f"w{o}", (4, 2), (0, 0), (4, 2), 257, "float32", "cpu", 0, True, True, ""),)
            layout = OptimizerLayout("SGD", rows, (), False, None, ("M",))
            raw = {"outside": outside, "collectives": collectives, "weights": ""}
            rank.steps[o] = {n: Step({**raw, "step": n}, layout) for n in range(5)}
        ranks.append(rank)
    return Trace(Path(), {"world": 2}, tuple(ranks), 0)


@pytest.mark.parametrize(
    ("counts", "sent", "outside", "codes"),
    [
        ((2, 1), 2, {"w1": True}, 1),
        ((2, 1), 8, {"w1": True}, 0),  # rank 0 sends the weights
        ((2, 2), 2, {"w1": True}, 0),  # ranks step apart on purpose, as of local SGD
        ((2, 1), 2, {"w1": False}, 0),  # rank 0 alone trains a part: a probe of its evaluation
        ((2, 1), 2, {}, 0),
    ],
)
def test_an_optimizer_that_steps_on_one_rank_is_a_finding(
    counts: tuple[int, int], sent: int, outside: dict[str, bool], codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = _ranks(counts, {"broadcast": [1, sent]}, outside)
    monkeypatch.setattr("lockstep_trace.rules.premises.reduced", lambda *_: {"w0"})
    assert [f.code for f in replicas.of_one_rank(trace)] == ["one-rank-steps"] * codes
    monkeypatch.setattr("lockstep_trace.rules.premises.reduced", lambda *_: set())
    assert [*replicas.of_one_rank(trace)] == []


@pytest.mark.parametrize(
    ("way", "counted", "suspected_"),
    [
        ("after the step", 2, True),
        ("after the step, of .data", 2, True),
        ("before the step", 0, False),
        ("after the step, kept for the next one", 0, False),
        ("after the step, of copies", 0, False),
        ("after the step, of a loss", 0, False),
        ("after the step, of equal gradients", 2, False),
        ("at times", 2, False),
    ],
)
def test_gradients_that_are_reduced_after_the_step_are_suspected(
    tmp_path: Path, way: str, counted: int, suspected_: bool
) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 3)
    optimizer = sgd(model, 0.1)
    late = way.startswith("after") or way == "at times"
    try:
        with lockstep_trace.traced(model, optimizer, folder=tmp_path / "trace"):
            for number in range(7):
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward()
                for after in (False, True):
                    if after:
                        optimizer.step()
                    grads = [p.grad for p in model.parameters()]
                    grads = [g.clone() for g in grads] if way.endswith("copies") else grads
                    grads = [g.data for g in grads] if way.endswith(".data") else grads  # type: ignore[union-attr]
                    grads = [loss.detach()] if way.endswith("a loss") else grads
                    each = None
                    for each in grads if after == late and (way != "at times" or number == 2) else ():
                        torch.distributed.all_reduce(each)
                    del grads, each
                if "kept" not in way:
                    optimizer.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
    steps = read(tmp_path / "trace").ranks[0].steps[0]
    assert max(s.reduced_late for s in steps.values()) == counted
    ranks = []
    for number in range(2):
        rank = Rank({"rank": number, "world": 2}, Path())
        rank.steps[0] = {n: Step(s.raw, s.layout) for n, s in steps.items()}
        for n, step in rank.steps[0].items():  # that of another rank
            other = number if "equal" not in way else 0
            values = {k: Value(v.fingerprint + other, v.square, None) for k, v in steps[n].grads.items()}
            step.__dict__["unclipped"] = values
        ranks.append(rank)
    rows = [*replicas.reduced_late(Trace(Path(), {}, tuple(ranks), 0), 0)]
    assert [f.code for f in rows] == (["reduced-after-step"] if suspected_ else [])
