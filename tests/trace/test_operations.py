"""`--level operations`: the first operation that differs between two traces is named, with the user's line."""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep_trace
from lockstep_trace.operations import aligned, comparison_lines, recorded, summary_lines
from lockstep_trace.read import read
from support.harness import lockstep_environment
from support.marks import long

HERE = os.path.relpath(__file__)


class Small(nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(F.gelu(self.first(x))))


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(
    folder: Path | None,
    loss: Loss = plain,
    seed: int = 0,
    step: int = 0,
    of: Callable[[], nn.Module] = Small,
    **options: Any,
) -> list[torch.Tensor]:
    """Train three steps, traced into `folder` if there is one, and return all weights."""
    torch.manual_seed(0)
    model = of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    torch.manual_seed(seed)
    block = (
        lockstep_trace.traced(model, optimizer, folder, "operations", step=step) if folder else contextlib.nullcontext()
    )
    generator = torch.Generator().manual_seed(1)
    with block:
        for _ in range(3):
            x = torch.randn(8, 16, generator=generator)
            optimizer.zero_grad()
            loss(model, x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if folder:
        assert not any(rank.errors for rank in read(folder).ranks)
    return [p.detach().clone() for p in model.parameters()]


def said(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> str:
    train(tmp_path / "a", **one)
    train(tmp_path / "b", **other)
    return "\n".join(comparison_lines(read(tmp_path / "a"), read(tmp_path / "b")))


def line_of(function: Any, text: str) -> str:
    """The file and line on which `text` stands in a function."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{HERE}:{at}"


def operations(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [o.raw for o in recorded(read(folder))[rank].operations]  # type: ignore[misc]


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    base = model(x).square().mean()
    return base + 0.5 * base.sqrt()


def more(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    base = model(x).square().mean()
    return base + 0.6 * base.sqrt()


def test_a_changed_constant_in_a_loss_is_named_with_its_lines(tmp_path: Path) -> None:
    text = said(tmp_path, {"loss": half}, {"loss": more})
    assert "mul.Tensor" in text
    assert line_of(half, "0.5 *") + " in the reference" in text
    assert line_of(more, "0.6 *") + " here" in text
    assert "other: 0.5 in the reference, 0.6 here" in text


def test_equal_runs_have_equal_operations(tmp_path: Path) -> None:
    text = said(tmp_path, {}, {})
    assert "have equal outputs, bit for bit" in text
    assert "differ" not in text


def test_another_seed_is_named_at_the_dropout(tmp_path: Path) -> None:
    text = said(tmp_path, {}, {"seed": 7})
    assert "bernoulli_" in text
    assert "in drop (forward)" in text
    assert line_of(Small.forward, "self.drop") in text
    assert "random numbers" in text


def spelled_out(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.drop(F.gelu(model.first(x)))
    return (hidden @ model.last.weight.t().contiguous() * 1.0001 + model.last.bias).square().mean()


def by_layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.drop(F.gelu(model.first(x)))
    return model.last(hidden).square().mean()


def test_other_operations_are_reported_with_both_lines(tmp_path: Path) -> None:
    text = said(tmp_path, {"loss": by_layers}, {"loss": spelled_out})
    assert "the operations differ" in text
    assert line_of(by_layers, "model.last(") in text
    assert line_of(spelled_out, "model.last.weight") in text


def with_a_look(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out.detach().abs().max()  # logged
    return out.square().mean()


def test_operations_of_one_side_without_effect_are_marked(tmp_path: Path) -> None:
    text = said(tmp_path, {}, {"loss": with_a_look})
    assert "equal outputs, bit for bit" in text
    assert "0 operations occur only in the reference and 2 only here, without changing a result" in text
    assert line_of(with_a_look, ".abs()") in text


def test_weights_that_differ_before_the_step_are_named(tmp_path: Path) -> None:
    def other() -> nn.Module:
        model = Small()
        with torch.no_grad():
            model.last.weight[0, 0] += 1.0
        return model

    text = said(tmp_path, {}, {"of": other})
    assert "its inputs differ already" in text
    assert "the weight last.weight, which differs before the step" in text


class Doubled(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * Doubled.factor


def doubled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(model(x)).square().mean()  # type: ignore[no-untyped-call, no-any-return]


def test_a_wrong_backward_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "a", doubled)
    monkeypatch.setattr(Doubled, "factor", 3.0)
    train(tmp_path / "b", doubled)
    text = "\n".join(comparison_lines(read(tmp_path / "a"), read(tmp_path / "b")))
    assert "(backward, backward of mul.Tensor)" in text
    assert line_of(Doubled.backward, "gradients[0] *") in text


def test_an_operation_of_backward_has_the_line_of_its_forward(tmp_path: Path) -> None:
    train(tmp_path / "a")
    backward = [o for o in recorded(read(tmp_path / "a"))[0].operations if o.raw["phase"] == "backward"]
    gelu = next(o for o in backward if "gelu_backward" in o.name)
    assert gelu.line == line_of(Small.forward, "F.gelu")
    assert gelu.raw["started"] == line_of(train, ".backward()")
    assert gelu.forward is not None
    assert gelu.forward.name == "gelu"
    products = [o for o in backward if o.name == "mm"]
    assert {o.raw["module"] for o in products} == {"first", "last"}


def test_each_phase_is_marked(tmp_path: Path) -> None:
    train(tmp_path / "a", foreach=True)
    phases = {o["phase"] for o in operations(tmp_path / "a")}
    assert phases == {"forward", "backward", "no grad", "optimizer"}
    foreach = [o for o in operations(tmp_path / "a") if "_foreach_" in o["op"] and o["phase"] == "optimizer"]
    assert foreach
    assert all(len(o["out"]) >= 4 for o in foreach if o["op"].endswith(("mul_.Scalar", "add_.Scalar")))


def test_only_the_chosen_step_is_recorded(tmp_path: Path) -> None:
    train(tmp_path / "a", step=2)
    (rank,) = read(tmp_path / "a").ranks
    assert [each["step"] for each in rank.operations] == [2]
    assert not rank.operations[0]["unfinished"]


def recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]


def recomputed_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [recomputed, recomputed_reentrant])
def test_a_recomputation_is_marked_and_equals_its_forward(tmp_path: Path, loss: Loss) -> None:
    train(tmp_path / "a", loss, step=1)
    rows = recorded(read(tmp_path / "a"))[0]
    first = [o for o in rows.operations if o.raw["phase"] in ("forward", "no grad") and o.name in ("addmm", "gelu")]
    again = [o for o in rows.operations if o.raw["phase"] == "recompute" and o.name in ("addmm", "gelu")]
    assert [o.raw["module"] for o in again] == [o.raw["module"] for o in first] or len(again) < len(first)  # early stop
    assert again
    for one, other in zip(first, again, strict=False):
        assert rows.values[one.raw["out"][0]].fingerprint == rows.values[other.raw["out"][0]].fingerprint
    gelu = next(o for o in rows.operations if "gelu_backward" in o.name)
    assert gelu.line == line_of(Small.forward, "F.gelu")


def cast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def in_place(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out.mul_(2.0)
    out.view(-1)[:4].zero_()
    return out.square().mean()


@pytest.mark.parametrize("loss", [plain, half, recomputed, recomputed_reentrant, cast, in_place, doubled, with_a_look])
@pytest.mark.parametrize("step", [0, 1])
def test_traced_weights_have_the_bits_of_untraced_ones(tmp_path: Path, loss: Loss, step: int) -> None:
    one, other = train(None, loss), train(tmp_path / "a", loss, step=step)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert len(operations(tmp_path / "a")) > 20


def test_in_place_writes_are_outputs_and_later_inputs(tmp_path: Path) -> None:
    train(tmp_path / "a", in_place)
    rows = operations(tmp_path / "a")
    at = next(i for i, o in enumerate(rows) if o["op"] == "aten.mul_.Tensor" and o["phase"] == "forward")
    assert rows[at]["in"] != rows[at]["out"]
    zero = next(i for i, o in enumerate(rows) if o["op"] == "aten.zero_.default" and o["phase"] == "forward")
    square = next(o for o in rows[zero:] if o["op"] == "aten.pow.Tensor_Scalar")
    assert square["of"] == [zero]  # made by the write through the view
    assert square["in"] != rows[at]["out"]


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_are_entered_and_left_as_without_the_tracer(tmp_path: Path) -> None:
    counts = []

    def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with Counting() as mode:
            result = model(x).square().mean()
        counts.append(mode.count)
        return result

    def around(folder: Path | None) -> list[torch.Tensor]:
        with Counting():
            return train(folder, counted)

    one = train(None, counted)
    other = train(tmp_path / "a", counted)
    third = around(tmp_path / "b")
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(one, third, strict=True))
    assert counts[3:6] == counts[6:9]
    assert min(counts[3:]) >= counts[0]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_memory_that_nothing_was_written_to_is_not_compared(tmp_path: Path) -> None:
    def empty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        room = torch.empty(8, 16)
        room.copy_(x)
        return model(room).square().mean()

    train(tmp_path / "a", empty, step=1)
    rows = operations(tmp_path / "a")
    copy = next(o for o in rows if o["op"] == "aten.copy_.default")
    assert len(copy["in"]) == 1
    assert all(o["out"] == [] for o in rows if o["op"].startswith("aten.empty"))


def resized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.resize_(4, 16)  # half of x
    z = torch.empty(0).resize_(64)
    return plain(model, y) + z.zero_().sum()


def test_a_resized_tensor_reads_old_elements_and_new_ones_are_undefined(tmp_path: Path) -> None:
    train(tmp_path, resized, step=1)
    cut, grown = (o for o in operations(tmp_path) if o["op"].startswith("aten.resize_"))
    assert (len(cut["in"]), len(cut["out"])) == (1, 1)
    assert (grown["in"], grown["out"]) == ([], [])


def attending(model: Any, x: torch.Tensor) -> torch.Tensor:
    parts = model.first(x).view(1, 8, 4, 8).transpose(1, 2).unbind(0) * 3
    return model.last(F.scaled_dot_product_attention(*(part[None] for part in parts)).reshape(8, 32)).square().mean()


def test_an_attention_backward_has_three_gradients(tmp_path: Path) -> None:
    train(tmp_path, attending)
    (forward,) = (o for o in operations(tmp_path) if "flash_attention_for_cpu." in o["op"])
    (backward,) = (o for o in operations(tmp_path) if "flash_attention_for_cpu_backward" in o["op"])
    assert (len(forward["out"]), len(backward["out"])) == (1, 3)


def test_a_part_of_new_memory_is_compared_once_it_is_written_to(tmp_path: Path) -> None:
    """ZeRO writes its gradients one after the other into one buffer."""

    def in_parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        room = torch.empty(256)
        parts = [room.narrow(0, 128 * i, 128) for i in (0, 1)]
        parts[0].copy_(x.view(-1))
        room.view(2, 128)
        parts[0].mul(1.5)
        parts[1].copy_(x.view(-1))
        return model(room.add(0.0)[:128].view(8, 16)).square().mean()

    train(tmp_path / "a", in_parts, step=1)
    rows = operations(tmp_path / "a")
    read_back = [
        (o["op"], o["in"]) for o in rows if o["op"] in ("aten.mul.Tensor", "aten.add.Tensor", "aten.view.default")
    ]
    whole = next(o for o in rows if o["op"] == "aten.view.default" and o["shapes"][0] == ["float32[256]"])
    assert whole["in"] == [-1]
    assert all(into != [-1] for op, into in read_back if op in ("aten.mul.Tensor", "aten.add.Tensor"))


def test_more_operations_than_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep_trace.tracer import operations as recording

    monkeypatch.setattr(recording, "MOST", 10)
    train(tmp_path / "a")
    assert len(operations(tmp_path / "a")) == 10
    (note,) = summary_lines(read(tmp_path / "a"))[1:]
    assert "operations more" in note


def test_pairs_are_found_across_operations_of_one_side(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", with_a_look)
    one, other = (recorded(read(tmp_path / name))[0].operations for name in "ab")
    pairs = [pair for both, _ in aligned(one, other) for pair in both]
    assert len(pairs) == len(one)
    assert all(x.key == y.key for x, y in pairs)


SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

factor, rank, world = float(sys.argv[1]), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
sharded = nn.Linear(8, 8)
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
    if hasattr(torch.distributed.fsdp, "fully_shard"):
        torch.distributed.fsdp.fully_shard(sharded)
optimizer = torch.optim.AdamW([*model.parameters(), *sharded.parameters()], lr=1e-2, foreach=False)
generator = torch.Generator().manual_seed(1)
for step in range(3):
    x = torch.randn(8, 16, generator=generator)[rank::world]
    optimizer.zero_grad()
    out = sharded(model(x))
    if rank == world - 1 and step == 1:
        out = out * factor
    out.square().mean().backward()
    optimizer.step()
    if world > 1:
        spread = x.sum().reshape(1)
        dist.all_reduce(spread)
if world > 1:
    dist.destroy_process_group()
"""


def command(tmp_path: Path, *words: str) -> str:
    environment = lockstep_environment(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_trace", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "internal error of the tracer" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.processes
def test_diff_prints_how_to_record_the_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, factor in (("a", "1.0"), ("b", "1.5")):
        command(tmp_path, "record", "-o", name, "--", sys.executable, "train.py", factor)
    text = command(tmp_path, "diff", "a", "b")
    assert "first difference: step 1" in text
    assert f"lockstep-trace record --level operations --step 1 -o b -- {sys.executable} train.py 1.5" in text
    for name, factor in (("a", "1.0"), ("b", "1.5")):
        told = command(
            tmp_path, "record", "--level", "operations", "-o", name, "--", sys.executable, "train.py", factor
        )
        assert "the operations of step 1, in which `diff` saw the first difference" in told
    text = command(tmp_path, "diff", "a", "b")
    line = 1 + SCRIPT.splitlines().index("        out = out * factor")
    assert f"mul.Tensor (forward), train.py:{line} here" in text
    assert "other: 1.0 in the reference, 1.5 here" in text
    assert "--level operations" not in text
    options = ["--level", "operations", "--step", "9", "-o", "a"]
    told = command(tmp_path, "record", *options, "--", sys.executable, "train.py", "1.0")
    assert "LS9180" in told
    assert "of 3; give another --step" in told


@pytest.mark.long
@pytest.mark.processes
def test_on_two_ranks_the_differing_rank_is_named_not_the_collective(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    start = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for name, factor in (("a", "1.0"), ("b", "1.5")):
        command(tmp_path, "record", "--level", "operations", "--step", "1", "-o", name, *start, factor)
    text = command(tmp_path, "diff", "a", "b")
    assert "operations of step 1 on rank 1" in text
    assert "other: 1.0 in the reference, 1.5 here" in text
    rows = recorded(read(tmp_path / "a"))
    assert sorted(rows) == [0, 1]
    for rank in (0, 1):
        (own,) = (
            o for o in rows[rank].operations if o.name.startswith("c10d.allreduce_") and o.raw["phase"] == "backward"
        )
        (asked,) = (o for o in rows[rank].operations if "allreduce" in o.name and o.raw["phase"] != "backward")
        assert own.raw["in"] != own.raw["out"]
        assert asked.line.startswith("train.py:")
    sums = [rows[r].values[o.raw["out"][0]] for r in (0, 1) for o in rows[r].operations if "allreduce" in o.name]
    assert {v.fingerprint for v in sums[:2]} == {v.fingerprint for v in sums[2:]}  # after the wait, both have the sum


COMPILED = """
import sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.b(nn.functional.gelu(self.a(x)))

torch.manual_seed(0)
model = Model()
if sys.argv[1] == "in place":
    model.compile(backend="aot_eager")
    called = model
elif sys.argv[1] == "function":
    called = torch.compile(lambda x: model(x), backend="aot_eager")
else:
    called = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    called(x).square().mean().backward()
    optimizer.step()
import torch._dynamo.utils
total = sum(p.double().sum().item() for p in model.parameters())
print(sorted(torch._dynamo.utils.counters["stats"].items()), total.hex())
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", [long("module"), long("in place"), long("function")])
def test_a_compiled_region_stays_compiled_and_is_one_entry(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(COMPILED)
    environment = lockstep_environment(tmp_path / "cache")
    alone = subprocess.run(
        [sys.executable, "train.py", how], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert alone.returncode == 0, alone.stderr
    traced = command(tmp_path, "record", "--level", "operations", "-o", "a", "--", sys.executable, "train.py", how)
    assert alone.stdout.strip()
    assert alone.stdout.strip() in traced  # the same graphs and the same bits
    assert "TORCH_COMPILE_DISABLE=1" in traced
    rows = operations(tmp_path / "a")
    (region,) = (o for o in rows if o["op"].startswith("compiled region"))
    assert region["shapes"] == [["float32[8, 16]"], ["float32[8, 8]"]]
    assert not any("addmm" in o["op"] or o["op"] == "aten.mm.default" for o in rows)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--step", "1"], "LS9183"),
        (["--level", "operations", "--step", "-1"], "LS9184"),
        (["--level", "operations", "--step", "3", "--steps", "3"], "LS9185"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused(options: list[str], code: str, capsys: Any) -> None:
    from lockstep_trace.commands import main

    assert main(["record", *options, "--", "python", "train.py"]) == 2
    assert code in capsys.readouterr().err


def test_traces_without_operations_or_of_other_steps_are_not_compared(tmp_path: Path) -> None:
    for name, step in (("a", 0), ("b", 1)):
        train(tmp_path / name, step=step)
    assert "LS9182" in comparison_lines(read(tmp_path / "a"), read(tmp_path / "b"))[0]
    for path in (tmp_path / "b").glob("rank-*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] != "operations"]
        path.write_text("\n".join(lines) + "\n")
    assert "LS9181" in comparison_lines(read(tmp_path / "a"), read(tmp_path / "b"))[0]
