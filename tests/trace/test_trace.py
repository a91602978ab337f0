"""Fingerprints and sketches of tensors: what they promise, judged on whole tensors by numpy and torch."""

import ast
import importlib
import math
import random
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep_trace
from lockstep.proof.step_writer import RankStep, StepWriter, WholeStep
from lockstep_trace import causes, tracer
from lockstep_trace.coded import TraceError
from lockstep_trace.compare_traces import compare_traces
from lockstep_trace.findings import findings
from lockstep_trace.ranks import Losses
from lockstep_trace.read import Step, read
from lockstep_trace.terminal import PlainOutput, diff
from lockstep_trace.tracer import Settings, engines, inputs
from lockstep_trace.tracer.hooks import Hooks
from lockstep_trace.tracer.placement import is_dtensor, plain_name
from support.messages import raises
from support.traced_cases import Averaging

ROOM = Path(lockstep_trace.__file__).parent


def test_the_hash_of_an_example_does_not_depend_on_padding() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 50256]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    right = inputs.call_inputs((), {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, -100])})
    wide = torch.tensor([[50256, 50256, 8, 9]])  # padded on the left, and farther
    left = inputs.call_inputs(
        (), {"attention_mask": torch.tensor([[0, 0, 1, 1]]), "labels": torch.tensor([-100]), "input_ids": wide}
    )
    assert right is not None
    assert left is not None
    assert right.hashes[1] == left.hashes[0] != right.hashes[0]
    assert right.targets is not None
    assert int(right.targets) == 1
    swapped = inputs.call_inputs((), {"input_ids": torch.tensor([[9, 8]]), "attention_mask": torch.tensor([[1, 1]])})
    assert swapped is not None
    assert swapped.hashes[0] != left.hashes[0]


def test_tensors_of_meshes_are_known_by_the_name_that_torch_2_4_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.Tensor):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("tensor"))
    monkeypatch.setitem(sys.modules, "torch.distributed._tensor", types.SimpleNamespace(DTensor=Other))
    assert is_dtensor(torch.ones(2).as_subclass(Other))
    assert not is_dtensor(torch.ones(2))


@pytest.mark.parametrize(
    ("name", "plainly"),
    [
        ("module.encoder.module.weight", "encoder.module.weight"),
        ("_orig_mod.module.0.weight", "0.weight"),
        ("layers.0._checkpoint_wrapped_module.fc._fsdp_wrapped_module.weight", "layers.0.fc.weight"),
        ("weight", "weight"),
    ],
)
def test_names_lose_what_wrappers_put_in_front(name: str, plainly: str) -> None:
    assert plain_name(name) == plainly


# -- the door for notebooks, in this process -------------------------------------------------------------------------


def train(folder: Path, steps: int = 4, rate: float = 0.1, factor: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    x, y = torch.randn(8, 6), torch.randint(2, (8,))
    with lockstep_trace.traced(model, optimizer, folder=folder):
        for _ in range(steps):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * factor).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_folder_that_is_not_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script with `import lockstep_trace` is traced from that line on."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        lockstep_trace.traced(model, optimizer, folder=tmp_path / "first"),
        lockstep_trace.traced(model, optimizer, folder=tmp_path / "second"),
    ):
        optimizer.step()
    err = capsys.readouterr().err
    assert f"traced already, into {tmp_path / 'first'}; {tmp_path / 'second'} is not used" in err
    assert not (tmp_path / "second").exists()


def test_a_block_of_a_notebook_is_traced_and_compared(tmp_path: Path) -> None:
    weights = train(tmp_path / "a")
    again = train(tmp_path / "b")
    assert all(torch.equal(w, v) for w, v in zip(weights, again, strict=True))
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    verdict = compare_traces(a, b, exact=True)
    assert verdict.first is None
    assert verdict.exact
    assert len(verdict.rows) == 4
    step = a.ranks[0].steps[0][3]
    assert step.weights["0.weight"].norm == pytest.approx(float(weights[0].double().norm()))
    assert math.sqrt(sum(v.square for v in step.grads.values())) == pytest.approx(0.05, rel=1e-4)
    assert {n for n, _ in a.ranks[0].steps[0][0].moments} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert findings(a) == []


def written(folder: Path, gradients: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Path:
    """A trace of one step of weights of zeros."""
    writer = StepWriter(folder, {name: torch.zeros_like(w) for name, w in after.items()}, "SGD", {"command": []})
    writer.step(WholeStep(0, 1.0, gradients, after, {"lr": 0.1}, None, [RankStep({0: 1.0}, [1.0], [1], ["a"])], 1.0))
    writer.close()
    return folder


@pytest.mark.parametrize("kind", ["gradient", "update", "buffers"])
@pytest.mark.parametrize("other", [math.inf, None])
def test_one_bit_of_a_large_tensor_is_a_difference(tmp_path: Path, kind: str, other: float | None) -> None:
    """Sums of sketches, which a trace holds in float32, do not show one: the fingerprint does. `other`: where the
    last bit goes; None: a zero with another sign."""
    draw = torch.Generator().manual_seed(3)
    sides = []
    for name in ("a", "b"):
        draw.manual_seed(3)
        tensors = {key: torch.randn(300, 300, generator=draw) for key in ("gradient", "update", "buffers")}
        place = tensors[kind][7, 7:8]
        if other is None:
            place.fill_(0.0 if name == "a" else -0.0)
        elif name == "b":
            place.copy_(torch.nextafter(place, torch.tensor(other)))
        after = {"w": tensors["update"], "table": tensors["buffers"]}
        sides.append(read(written(tmp_path / name, {"w": tensors["gradient"]}, after)))
    verdict = compare_traces(*sides, exact=True)
    assert verdict.first == kind
    assert compare_traces(*sides).first is None  # the control: it is nothing but rounding
    assert compare_traces(sides[0], sides[0], exact=True).exact


def test_a_gradient_of_nan_on_one_side_alone_is_a_difference(tmp_path: Path) -> None:
    weights = {"w": torch.ones(3), "v": torch.ones(3)}
    gradients = {"w": torch.ones(3), "v": torch.full((3,), math.nan)}
    a, b = (read(written(tmp_path / name, gradients, weights)) for name in ("a", "b"))
    step = b.ranks[0].steps[0][0]
    vars(step)["unclipped"] = {"w": step.grads["w"]}  # as of a rank on which v took no part
    verdict = compare_traces(a, b)
    assert (verdict.first, verdict.lines) == ("gradient", ("v: a gradient only on one side",))


@pytest.mark.parametrize(
    ("every", "steps", "measured"), [(3, None, [0, 3, 6]), (1, 4, [0, 1, 2, 3]), (2, 5, [0, 2, 4])]
)
def test_measured_steps_equal_those_of_a_full_trace(
    tmp_path: Path, every: int, steps: int | None, measured: list[int]
) -> None:
    for name, settings in (("whole", {}), ("part", {"every": every, "steps": steps})):
        torch.manual_seed(0)
        model, data = nn.Linear(6, 3), torch.randn(8, 4, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tracer.begin(Settings(str(tmp_path / name), **settings))
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        tracer.end()
    whole, part = read(tmp_path / "whole"), read(tmp_path / "part")
    assert [s for s in part.steps(0) if part.at(0, s)[0][1].measured] == measured
    assert part.steps(0) == list(range(steps or 8))
    verdict = compare_traces(whole, part, exact=True)
    assert verdict.first is None or verdict.lines[0].startswith("8 steps in the reference")
    assert all(not (row.gradient or row.update) for row in verdict.rows)
    assert [row.step for row in verdict.rows if row.update is not None] == measured


def test_the_first_difference_in_causal_order_is_named(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "loss", factor=2.0)
    train(tmp_path / "rate", rate=0.2)
    a = read(tmp_path / "a")
    loss, rate = compare_traces(a, read(tmp_path / "loss")), compare_traces(a, read(tmp_path / "rate"))
    assert (loss.first, loss.step) == ("loss", 0)
    assert (rate.first, rate.step) == ("learning rate", 0)


def test_a_trace_without_a_ranks_shard_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a")
    assert diff(tmp_path / "a", tmp_path / "a", PlainOutput()) == 0
    assert "is missing" not in capsys.readouterr().out
    (file,) = (tmp_path / "a").glob("rank-*.jsonl")
    whole, half = '"shape":[5,6],"offset":[0,0],"size":[5,6]', '"shape":[5,6],"offset":[0,0],"size":[2,6]'
    text = file.read_text()
    assert whole in text
    file.write_text(text.replace(whole, half))
    diff(tmp_path / "a", tmp_path / "a", PlainOutput())
    assert "no rank has written all of 0.weight" in capsys.readouterr().out.replace("\n", " ")


def test_an_optimizer_of_one_side_is_reported_as_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("both", "one"):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        tracer.begin(Settings(str(tmp_path / name)))
        for x in torch.randn(3, 4, 3):
            model.zero_grad()
            model[1](model[0](x)).square().mean().backward()
            for optimizer in optimizers if name == "both" else optimizers[:1]:
                optimizer.step()
        tracer.end()
    assert diff(tmp_path / "both", tmp_path / "both", PlainOutput()) == 0
    assert "it is not compared" not in capsys.readouterr().out
    diff(tmp_path / "both", tmp_path / "one", PlainOutput())
    assert f"SGD (optimizer 1) takes steps only in {tmp_path / 'both'}" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("order", "cause"),
    [([0, 2, 1, 3], "in another order"), ([0, 1, 0, 1], "8 examples occur more often than any does in as many steps")],
)
def test_repeated_examples_are_not_another_order(tmp_path: Path, order: list[int], cause: str) -> None:
    data = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
    for name, numbers in (("a", [0, 1, 2, 3]), ("b", order)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep_trace.traced(model, optimizer, folder=tmp_path / name):
            for x in data[numbers]:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    verdict = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert verdict.first == "examples"
    assert cause in verdict.cause


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize("inner", [True, False])
def test_the_model_decides_whether_it_trains_and_not_its_wrapper(tmp_path: Path, inner: bool) -> None:
    model = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1)))
    model.train(not inner)
    model.module.train(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, folder=tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert [f.code for f in findings(read(tmp_path))] == ([] if inner else ["trained-in-evaluation-mode"])


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is wrong."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_the_first_module_that_differs_is_named_at_the_level_of_modules(tmp_path: Path) -> None:
    """The control is a trace of the right model, and one without modules."""
    for name, by, level in (
        ("a", 1.0, "modules"),
        ("b", 1.5, "modules"),
        ("c", 1.0, "modules"),
        ("d", 1.5, "gradients"),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Scaled(by), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep_trace.traced(model, optimizer, folder=tmp_path / name, level=level):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))).square().mean().backward()
                optimizer.step()
    a, b, c, d = (read(tmp_path / name) for name in "abcd")
    verdict = compare_traces(a, b)
    assert verdict.first == "loss"
    assert "the first module whose output differs: 2 by" in verdict.lines[-1]
    assert compare_traces(a, c).first is None
    assert len(compare_traces(a, d).lines) == 1


def test_the_module_whose_backward_is_wrong_is_named_at_the_level_of_modules(tmp_path: Path) -> None:
    """The control is a trace of the right model."""
    for name, inner in (("a", nn.Identity()), ("b", Wrong()), ("c", nn.Identity())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), inner, nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep_trace.traced(model, optimizer, folder=tmp_path / name, level="modules"):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))).square().mean().backward()
                optimizer.step()
    verdict = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert verdict.first == "gradient"
    assert "in backward whose output gets another gradient: 1 by" in verdict.lines[-1]
    assert compare_traces(read(tmp_path / "a"), read(tmp_path / "c")).first is None


class Drawn(nn.Dropout):
    """Dropout whose draw is given: every second element, from the first or the second on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * (torch.arange(x.shape[1]) % 2 == self.first) if self.p else x

    first = 0


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_dropout_is_named_where_gradients_differ_and_losses_nearly_agree(tmp_path: Path, dropout: float) -> None:
    """As in the first step of any model from scratch: its loss is the logarithm of the number of classes. The control
    has no dropout, and gradients that were changed."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), drawn := Drawn(dropout), nn.Linear(16, 2), Scaled(1e-4))
        drawn.first = seed - 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep_trace.traced(model, optimizer, folder=tmp_path / name):
            nn.functional.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                if seed == 2 and not dropout and parameter.grad is not None:
                    parameter.grad = parameter.grad.roll(1, 0)
            optimizer.step()
    verdict = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert verdict.first == "gradient"
    assert (verdict.cause == causes.OTHER_DRAWS) is (dropout > 0), verdict.cause


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    train(tmp_path / "a")
    path = next((tmp_path / "a").glob("rank-*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"kind":"step"' in line)
    path.write_text("".join(lines[:last]) + lines[last][:500])
    assert read(tmp_path / "a").steps(0) == [0, 1, 2]


def test_two_traces_without_a_common_name_are_refused_with_both_lists(tmp_path: Path) -> None:
    train(tmp_path / "a")
    model = nn.Bilinear(2, 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, folder=tmp_path / "b"):
        model(torch.ones(1, 2), torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with raises("LS9010", "0.weight", error=TraceError):
        compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))


class Held(torch.utils.data.Dataset):
    """Examples with noise of a generator that each worker gets a copy of."""

    def __init__(self, own: bool) -> None:
        self.noises = [random.Random(1)] if own else []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((6,), float(i)) + (self.noises[0].random() if self.noises else torch.rand(()))


@pytest.mark.processes
@pytest.mark.parametrize("own", [True, False])
def test_workers_that_draw_the_same_numbers_are_a_finding(tmp_path: Path, own: bool) -> None:
    """The control draws from torch, which seeds each worker for itself. Starts worker processes."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, folder=tmp_path):
        loader = torch.utils.data.DataLoader(Held(own), batch_size=2, num_workers=2)
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        assert loader.worker_init_fn is None
    trace = read(tmp_path)
    assert len(trace.ranks[0].workers) == 2
    assert [f.code for f in findings(trace)] == (["same-workers"] if own else [])


def read_ahead(loader):  # type: ignore[no-untyped-def]
    """Iterate as Accelerate's loaders do: the pass ends before its last batch is used."""
    iterator = iter(loader)
    batch = next(iterator)
    for following in iterator:
        yield batch
        batch = following
    yield batch


@pytest.mark.parametrize("steps", [5, None])
def test_a_partially_traced_pass_lacks_no_examples(tmp_path: Path, steps: int | None) -> None:
    """The control leaves out a batch of each pass."""
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    data = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)))
    for name in ("right", "wrong"):
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 16, False))
        tracer.begin(Settings(str(tmp_path / name), steps=steps))
        for _ in range(2):
            for i, (x,) in enumerate(read_ahead(loader)):
                if name == "wrong" and i == 1:
                    continue
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        tracer.end()
        assert [f.code for f in findings(read(tmp_path / name))] == (["seen-part"] if name == "wrong" else [])


@pytest.mark.parametrize("seed", [0, 1])
def test_an_epoch_that_has_the_order_of_the_resumed_one_is_a_finding(tmp_path: Path, seed: int) -> None:
    data = torch.randn(32, 6)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def sampler(seed: int) -> torch.utils.data.RandomSampler:
        return torch.utils.data.RandomSampler(range(32), generator=torch.Generator().manual_seed(seed))

    rest = [*torch.utils.data.BatchSampler(sampler(0), 4, drop_last=False)][5:]
    with lockstep_trace.traced(model, optimizer, folder=tmp_path / "a"):
        for loader in (
            torch.utils.data.DataLoader(data, batch_sampler=rest),
            torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler(seed)),
        ):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    found = [(f.code, f.step) for f in findings(read(tmp_path / "a")) if f.code == "same-order"]
    assert found == ([("same-order", 3)] if seed == 0 else [])


@pytest.mark.parametrize("makes_state", ["", "at the rate 0", "from zeros"])
def test_a_step_that_creates_state_before_a_load_is_no_step(tmp_path: Path, makes_state: str) -> None:
    """As torch's distributed checkpoints and Megatron-FSDP have it; a first step of a warm-up at the rate 0 is one."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    tracer.begin(Settings(str(tmp_path)))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if makes_state == "from zeros":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    if makes_state == "at the rate 0":
        assert get_optimizer_state_dict(model, optimizer)["state"]
    for i in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 6) + i).square().mean().backward()
        optimizer.step()
        scheduler.step()
    tracer.end()
    trace = read(tmp_path)
    steps = trace.ranks[0].steps[0]
    assert [steps[i].groups[0]["lr"] for i in sorted(steps)] == [0.0, 0.05, 0.1]
    assert not findings(trace)


@pytest.mark.parametrize(
    ("stepped", "steps", "kept", "code"),
    [
        ("never", None, None, ["scheduler-not-stepped"]),
        ("never", None, 4, ["scheduler-not-stepped"]),
        ("never", None, 3, []),  # cut off between the first epoch and the second
        ("never", 3, None, []),
        ("by epoch", 4, None, []),
        ("by epoch", None, None, []),
        ("another", None, None, []),
        ("by its maker", None, None, []),  # Lightning steps it at epochs of its own choice
    ],
)
def test_an_epoch_without_a_scheduler_step_is_a_finding(
    tmp_path: Path, stepped: str, steps: int | None, kept: int | None, code: list[str]
) -> None:
    """Two epochs have three steps each; `steps` are recorded, and a kill leaves `kept` of them."""
    tracer.begin(Settings(str(tmp_path), steps=steps))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kinds = torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.LinearLR
    maker = "lightning.pytorch.core.module" if stepped == "by its maker" else __name__
    make = eval("lambda kind, optimizer: kind(optimizer, 0.5, total_iters=9)", {"__name__": maker})
    schedulers = [make(kind, optimizer) for kind in kinds]
    chosen = {"by epoch": schedulers, "another": schedulers[:1]}.get(stepped, [])
    data = torch.utils.data.TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)))
    for _ in range(2):
        for (x,) in torch.utils.data.DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for scheduler in chosen:
            scheduler.step()
    del schedulers, chosen
    tracer.end()
    if kept is not None:
        path = next(tmp_path.glob("rank-*.jsonl"))
        lines = path.read_text().splitlines(keepends=True)
        after = [i for i, line in enumerate(lines) if '"kind":"step"' in line][kept]
        path.write_text("".join(lines[:after]))
    assert [f.code for f in findings(read(tmp_path))] == code


def test_a_loss_of_one_class_trains_nothing(tmp_path: Path) -> None:
    """torch's tutorial series on DDP computes such a loss."""
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lockstep_trace.traced(model, optimizer, folder=tmp_path):
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.rand(8, 20)), torch.rand(8, 1)).backward()
            optimizer.step()
    (found,) = findings(read(tmp_path))
    assert found.code == "all-zero"
    assert "a single class" in found.cause


def test_an_engine_that_imports_the_tracer_is_traced_from_the_end_of_its_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`import deepspeed` before torch is such a case."""
    module = types.ModuleType("deepspeed")
    spec = ModuleSpec("deepspeed", None)
    vars(spec)["_initializing"] = True
    module.__spec__ = spec
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    installed: list[str] = []
    monkeypatch.setattr(engines, "install", lambda hooks, name: installed.append(name))
    monkeypatch.setattr(engines, "EVALUATORS", {})
    monkeypatch.setattr(engines, "LOADS", "no_such_module")
    hooks = Hooks()
    engines.watch(hooks)
    assert installed == []
    setattr(spec, "_initializing", False)  # noqa: B010 - as importlib does
    assert installed == ["deepspeed"]
    engines.watch(hooks)
    assert installed == ["deepspeed", "deepspeed"]


@pytest.mark.parametrize("name", [*engines.EVALUATORS])
def test_scores_of_known_evaluators_are_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name is imported after the trace began; what it returns is what its caller gets."""
    kind, method = engines.EVALUATORS[name]
    result = {"eval_accuracy": 0.5, "eval_runtime": 3.0, "names": ["a"], "count": 7}
    package, last = tmp_path / "own" / name.partition(".")[0], name.partition(".")[2]
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    code = [f"class {kind}:", f"    def {method}(self):", "        'Returns scores.'", f"        return {result}"]
    (package / f"{last}.py").write_text("\n".join(code))
    for known in [m for m in sys.modules if m.partition(".")[0] == package.name]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.syspath_prepend(tmp_path / "own")
    recorder = tracer.begin(Settings(str(tmp_path / "t")))
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, engines.Finder)])
    engines.watch(tracer._INSTALLED[0])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    evaluator = getattr(importlib.import_module(name), kind)
    wrapped = getattr(evaluator, method)
    copied = types.FunctionType(wrapped.__code__, wrapped.__globals__, method, None, wrapped.__closure__)
    copied.__doc__ += " As the library evaluate makes one for each metric."
    assert copied(evaluator()) == result
    assert recorder.steps == [1]
    tracer.end()
    for own in [m for m in sys.modules if m.partition(".")[0] == package.name]:
        del sys.modules[own]  # else later tests import it in place of the library
    (record,) = read(tmp_path / "t").ranks[0].scores
    assert (record["by"], record["steps"]) == (f"{kind}.{method}", [1])
    assert record["scores"] == {"eval_accuracy": 0.5, "count": 7.0}


def test_divisors_are_named_if_they_are_integers() -> None:
    assert causes._divided(200, 16, 200 / 141) == (200, 141)
    assert causes._divided(200, 16, 184 / 141) == (184, 141)  # the next token: one target of each example is none
    assert causes._divided(200, 16, 1.2345) is None
    assert causes._divided(200, 16, 1.0) is None
    assert causes._divided(None, 16, 0.5) is None


@pytest.mark.parametrize(("targets", "ranks", "named"), [(None, 2, True), (None, 1, False), ([8], 2, False)])
def test_mean_of_means_is_named_without_target_counts(targets: list[int] | None, ranks: int, named: bool) -> None:
    def losses(count: int, value: float) -> Losses:
        return Losses(((value,),) * count, ((16 // count,),) * count)

    one, more = Step({"targets": targets}, None), Step({"targets": targets and [8 // ranks]}, None)  # type: ignore[arg-type]
    cause = causes.of_loss(losses(1, 3.9413), losses(ranks, 3.9441), [one], [more] * ranks, stochastic=False)
    assert ("a mean of means, if" in cause) is named
    assert "the loss function or its options differ" in cause


def test_the_tracer_imports_only_torch() -> None:
    allowed = {*sys.stdlib_module_names, "torch"}
    for path in (ROOM / "tracer").glob("*.py"):
        if path.name == "engines.py":
            continue  # imported where the script has imported deepspeed
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert [n for n in names if n.split(".")[0] not in allowed] == [], path


@pytest.mark.parametrize("zero", ["none", "zeros", "data", "never"])
def test_gradients_that_are_not_zeroed_are_a_finding_and_two_optimizers_are_not(tmp_path: Path, zero: str) -> None:
    """As in an adversarial network: the second loss adds to the first model's gradients, which are zeroed later."""
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    models = [one, other]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
    with lockstep_trace.traced(one, optimizers[0], folder=tmp_path):
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                for parameter in model.parameters() if zero == "data" else ():
                    if parameter.grad is not None:
                        parameter.grad.data.zero_()
                if zero in ("none", "zeros"):
                    optimizer.zero_grad(set_to_none=zero == "none")
                other(one(torch.randn(3, 4))).square().mean().backward()
                optimizer.step()
    trace = read(tmp_path)
    assert trace.optimizers == [0, 1]
    assert {f.code for f in findings(trace)} == ({"not-zeroed"} if zero == "never" else set())


def test_nested_optimizer_steps_count_once_with_the_inner_moments(tmp_path: Path) -> None:
    """As in ZeroRedundancyOptimizer, where torch calls hooks for both. The control is a scaler's skipped step."""
    model = nn.Linear(6, 1)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    tracer.begin(Settings(str(tmp_path)))
    optimizer, scaler = Averaging(inner), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 6)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    tracer.end()
    (rank,) = read(tmp_path).ranks
    assert {o: sorted(steps) for o, steps in rank.steps.items()} == {0: [0, 1]}
    assert [(s["opt"], s["step"]) for s in rank.skipped] == [(0, 1)]
    assert {name for _, name in rank.steps[0][0].moments} == {"exp_avg", "exp_avg_sq"}
    assert all(len(s.losses) == 1 for s in rank.steps[0].values())
