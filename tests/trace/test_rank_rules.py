"""Rules on ranks, on records of two ranks that no process wrote; a bias before a batch norm is no finding."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep_trace import tracer
from lockstep_trace.findings import findings, likely
from lockstep_trace.ranks import Whole
from lockstep_trace.read import OptimizerLayout, Rank, Step, Trace, Value, read
from lockstep_trace.rules import observed, replicas, schedules
from lockstep_trace.tracer import Settings, inputs, observers, placement

LAYOUT = OptimizerLayout("SGD", (), (), False, None, ("M",))
NAMES = ("net.weight", "margin.weight")


def trace_of(*ranks: list[dict[str, Any]], models: list[Any] = [], loaders: list[Any] = []) -> Trace:  # noqa: B006
    rows = []
    for number, steps in enumerate(ranks):
        rank = Rank({"rank": number, "world": 2}, Path(), models=models, loaders=loaders)
        rank.steps[0] = {n: Step({"step": n, "weights": {}} | raw, LAYOUT) for n, raw in enumerate(steps)}
        rank.ended = {"steps": [len(steps)]}
        rows.append(rank)
    return Trace(Path(), {}, tuple(rows), 0)


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "wrong"),
        ({"mixed": False}, "suspicious"),
        ({"sampler": False}, "suspicious"),
        ({"exchanges": True}, "verbose"),
        ({"ignored": ["margin.weight"]}, "verbose"),
        ({"wrapped": 2}, "proved before"),
    ],
)
def test_gradients_of_a_model_without_a_wrapper(
    change: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class weights outside of DDP, whose gradients each rank has for itself, while those of the model are reduced."""
    group = {"ranks": 2, "ignored": change.get("ignored", []), "hooked": False, "part": False, "buffers": True}
    models = [{"group": group, "wrappers": []}, {"group": group if change.get("wrapped") else None, "wrappers": []}]
    loaders = [{"sampler": "DistributedSampler" if change.get("sampler", True) else "", "replicas": 2}]
    examples = [["a", "b"], ["a", "b"] if change.get("mixed", True) else ["c", "d"]]
    trace = trace_of(*([{"examples": rows}] * 4 for rows in examples), models=models, loaders=loaders)

    def merged(trace: Trace, optimizer: int, step: int, of: Any) -> dict[str, Whole]:
        return {n: Whole(Value(1, 1.0), (1,), 0, {1: 0.5} if n == NAMES[1] else {}) for n in NAMES}

    monkeypatch.setattr(replicas, "merged", merged)
    monkeypatch.setattr(replicas.premises, "merged", merged)
    monkeypatch.setattr(replicas.premises, "exchanges", lambda trace, optimizer: change.get("exchanges", False))
    finding = replicas._not_reduced(trace, 0, 0, [NAMES[1]], 0.5)
    assert finding.code == "not-reduced-some"
    if level == "proved before":
        assert finding.level == "wrong"
        assert "wrapped and its" not in finding.what
    else:
        assert (finding.level, finding.likely) == ("wrong" if level == "wrong" else "suspicious", level == "suspicious")


@pytest.mark.parametrize(("sent", "evaluating", "suspected"), [(0, 2, True), (8, 2, False), (0, 1, False)])
def test_statistics_of_a_model_whose_buffers_are_not_sent(sent: int, evaluating: int, suspected: bool) -> None:
    """DDP with broadcast_buffers=False leaves each rank its own; a script may average them by itself, and a rank that
    alone evaluates and saves has the statistics that DDP would send."""
    group = {"ranks": 2, "ignored": [], "hooked": False, "buffers": False}
    steps = [{"collectives": {"all_reduce": [1, sent]}}] * 4
    trace = trace_of(steps, steps, models=[{"group": group, "wrappers": ["DistributedDataParallel"]}])
    for rank in trace.ranks[:evaluating]:
        rank.evaluations.append({"trained": True})
    names = {"1.running_mean": Whole(Value(1, 1.0), (8,), 0, {1: 0.5})}
    assert replicas._buffers(trace, 0, names, 0).likely is suspected


@pytest.mark.parametrize("way", ["sums", "divided", "of sums", "adam", "another operation", "one axis"])
def test_gradients_summed_over_ranks_and_not_divided(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    layer = nn.Linear(3, 2)
    layer(torch.ones(4, 3)).mean().backward()
    since = SimpleNamespace(summed={}, backwards=1, means=0 if way == "of sums" else 1)
    for p in layer.parameters():
        named = {"op": torch.distributed.ReduceOp.MAX} if way == "another operation" else {}
        group = SimpleNamespace(size=lambda: 1) if way == "one axis" else None
        observers._summed(SimpleNamespace(since=since, steps=[1]), p.grad, None, group, named)
        if way == "divided":
            p.grad.data /= 2  # type: ignore[union-attr]
    optimizer = (torch.optim.Adam if way == "adam" else torch.optim.SGD)(layer.parameters(), 0.1)
    notes = observers.undivided_sums(since, optimizer, list(layer.parameters()))
    assert notes == ([("summed over ranks", "2")] if way == "sums" else [])


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_share_examples_may_sum_parts_of_a_gradient(shared: bool) -> None:
    """Tensor parallelism by hand: each rank has the gradient of its own part of the layer behind."""
    rows = [
        [{"observed": [("summed over ranks", "2")], "examples": [f"{s}" if shared else f"{r}.{s}"]} for s in range(4)]
        for r in (0, 1)
    ]
    assert [f.code for f in observed.notes(trace_of(*rows), 0)] == ([] if shared else ["ranks-undivided"])


def test_a_model_knows_whether_its_wrapper_sends_buffers() -> None:
    wrapper = SimpleNamespace(process_group=SimpleNamespace(size=lambda: 2), broadcast_buffers=False)
    assert placement._group(wrapper)["buffers"] is False


def test_a_part_that_is_called_without_its_wrapper_has_its_group() -> None:
    """As in `ddp.module.encoder(x)`, where no gradient is reduced."""
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    wrapper = SimpleNamespace(module=model, process_group=SimpleNamespace(size=lambda: 2))
    assert placement.replicas_of(model["encoder"], [lambda: wrapper]) == placement._group(wrapper) | {"part": False}
    assert placement.replicas_of(nn.Linear(2, 2), [lambda: wrapper]) is None


@pytest.mark.parametrize("sent", [0, 8])
def test_ranks_that_average_by_themselves_are_not_accused(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local SGD: steps under no_sync, then a mean of the weights, which may come after the last step."""
    group = {"ranks": 2, "ignored": [], "hooked": False, "part": False, "buffers": True}
    steps = [{"collectives": {"all_reduce": [1, sent]}}] * 4
    trace = trace_of(steps, steps, models=[{"group": group, "wrappers": ["DistributedDataParallel"]}])
    monkeypatch.setattr(replicas, "merged", lambda *_: {"w": Whole(Value(1, 1.0), (8,), 0, {1: 0.5})})
    monkeypatch.setattr(replicas.premises, "apart_at_end", lambda *_: True)
    monkeypatch.setattr(replicas.premises, "exchanges", lambda *_: sent > 0)
    assert replicas._not_reduced(trace, 0, 0, ["w"], 0.5).level == ("suspicious" if sent else "wrong")


def test_a_bias_before_a_batch_norm_is_no_finding(tmp_path: Path) -> None:
    """Its gradient is zero but for rounding, so that updates are below its last bit."""
    tracer.begin(Settings(str(tmp_path)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias += 100  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    tracer.end()
    assert likely(findings(read(tmp_path))) == []


def test_inputs_of_two_models_are_not_compared(tmp_path: Path) -> None:
    """A head that is evaluated on features is on another scale than a body that is trained on pictures."""
    tracer.begin(Settings(str(tmp_path)))
    torch.manual_seed(0)
    body, head = nn.Linear(40, 40), nn.Linear(40, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.01)
    for _ in range(6):
        optimizer.zero_grad()
        head(body(50 * torch.randn(16, 40)) / 2000).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        head(torch.randn(16, 40) / 2000)
    tracer.end()
    assert "inputs-on-another-scale" not in [f.code for f in findings(read(tmp_path))]


def drawn(rank: int, step: int, way: str) -> dict[str, Any]:
    """Hashes of a step's inputs: examples, and numbers that are drawn, or 0 where all are one."""
    time = {"one time": 0, "own numbers": 10 * step + rank + 1, "a fixed grid": 7}.get(way, step + 1)
    example = 100 + step if way == "one example" else 100 + 10 * step + rank
    example = 100 + rank if way == "own cameras" else example
    sent = {"all_gather": [1, 8]} if way == "activations" else {"all_reduce": [1, 8]}
    return {"parts": [[example, time]], "drawn": [rank if way == "own seeds" else 5], "collectives": sent}


def test_numbers_that_all_ranks_draw_alike_are_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right: a time that all examples share, numbers of each rank, a grid that stays, ranks with the same examples,
    ranks that reduce nothing, a camera of each rank, ranks of other seeds, which share numbers on purpose, and those
    that send each other activations."""
    near = (
        "one time",
        "own numbers",
        "a fixed grid",
        "one example",
        "apart",
        "own cameras",
        "own seeds",
        "activations",
    )
    for way in ("same numbers", *near):
        names = set() if way == "apart" else {"w"}
        monkeypatch.setattr(replicas.premises, "reduced", lambda trace, optimizer, names=names: names)
        rows = [*replicas.same_noise(trace_of(*([drawn(r, s, way) for s in range(4)] for r in (0, 1))), 0)]
        assert [f.code for f in rows] == (["same-noise"] if way == "same numbers" else []), way


def test_an_input_of_equal_numbers_has_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    x, time, positions = torch.randn(4, 2), torch.full((4,), 0.5), torch.arange(9).expand(4, 9)
    many = (x, time, positions, torch.linspace(0, 1, 4), torch.tensor([2, 0, 3, 1]))
    assert [bool(n) for n in inputs.hashes_of_inputs(many, {})[0]] == [True, False, False, False, True]
    assert inputs.hashes_of_inputs((x, torch.rand(5)), {}) == inputs.hashes_of_inputs((x,), {}) == []


def test_a_schedule_in_micro_batches_is_suspected() -> None:
    """Accelerate steps it with the optimizer, once in four micro-batches. Right: it is as long as the run's steps, or
    the run takes one micro-batch a step and ends early, or another optimizer continues it."""
    for length, backwards, suspected in ((128, 4, True), (32, 4, False), (96, 1, False)):
        trace = trace_of([{"backwards": backwards, "examples": [str(n)]} for n in range(32)])
        row = {"name": "LambdaLR", "length": length, "count": 32, "opt": 0, "resumed": False}
        trace.ranks[0].ended = {"steps": [32], "lengths": [row]}
        rows = [*schedules.unit(replace(trace, about={"status": 0}), 0)]
        assert [f.code for f in rows] == ["scheduler-unit"] * suspected
        assert not suspected or "its length counts micro-batches: divide it by 4" in rows[0].cause
        assert [f.likely for f in rows] == [True] * suspected
        trace.ranks[0].ended["lengths"].append(row | {"opt": 1, "resumed": True})
        assert [*schedules.unit(replace(trace, about={"status": 0}), 0)] == [], "the other half of the run"
    trace = trace_of([{"backwards": 2, "examples": [str(n)]} for n in range(32)])  # or it ends early, at a half
    trace.ranks[0].ended = {"steps": [32], "lengths": [row | {"length": 64}]}
    assert [f.likely for f in schedules.unit(replace(trace, about={"status": 0}), 0)] == [False]
