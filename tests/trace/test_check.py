"""`--check`: a step recomputed on copies. Faults that no rule names are found, what looks like them is not, and the
training keeps its bits."""

import gc
import importlib.util
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import lockstep_trace
from lockstep_trace import tracer
from lockstep_trace.coded import TraceError
from lockstep_trace.commands import checked_steps
from lockstep_trace.findings import Finding, findings, proved
from lockstep_trace.read import read
from lockstep_trace.rules import checks
from lockstep_trace.tracer import Settings, observers
from support.checked_cases import (
    KEEP_BITS,
    PAIRS,
    X,
    Y,
    codes_that_are_sampled,
    positions_of_rows,
    statistics_of_micro_batches,
    streams_time_first,
)
from support.harness import lockstep_environment

NOT_RECOMPUTED = ("stateful", "plain_stateful", "in_backward")  # a hook, a counter, a step inside of backward


def checked(case: Callable[[], object], folder: Path, steps: tuple[int, ...] = (1,)) -> list[Finding]:
    torch.manual_seed(0)
    tracer.begin(Settings(str(folder), check=steps))
    case()
    tracer.end()
    trace = read(folder)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    assert any(rank.checks for rank in trace.ranks)
    return findings(trace)


@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.__name__)
def test_faults_are_named_and_healthy_lookalikes_are_not(
    tmp_path: Path, case: Callable[[bool], None], wrong: bool
) -> None:
    rows = checked(lambda: case(wrong), tmp_path)
    assert [f.code for f in proved(rows) if f.code != "unchanged"] == []
    codes = {f.code for f in rows if f.level == "suspicious" and f.code.startswith(("check-", "divided-"))}
    assert codes == ({PAIRS[case]} if wrong else set())
    assert all(f.otherwise and f.decides for f in rows if f.level == "suspicious")


def test_module_and_operation_are_named(tmp_path: Path) -> None:
    (finding,) = [f for f in checked(lambda: positions_of_rows(True), tmp_path) if f.code == "check-rows"]
    assert "rows in another order" in finding.what
    assert "first in places (embedding)" in finding.what


def bits(case: Callable[[], nn.Module]) -> tuple[list[torch.Tensor], list[object]]:
    torch.manual_seed(0)
    random.seed(0)
    model = case()
    state = [t.clone() for t in model.state_dict().values()]
    return state, [torch.get_rng_state().tolist(), random.getstate(), [m.training for m in model.modules()]]


@pytest.mark.parametrize("case", KEEP_BITS, ids=lambda case: case.__name__)
def test_a_checked_run_has_the_bits_of_an_unchecked_one(case: Callable[[], nn.Module], tmp_path: Path) -> None:
    plain = bits(case)
    tracer.begin(Settings(str(tmp_path), check=(0, 1, 2, 3)))
    traced = bits(case)
    tracer.end()
    assert all(torch.equal(a, b) for a, b in zip(plain[0], traced[0], strict=True))
    assert plain[1] == traced[1]
    (rank,) = read(tmp_path).ranks
    assert rank.errors == []
    assert len(rank.checks) >= 4
    assert all(not c.get("of") for c in rank.checks) == (case.__name__ in NOT_RECOMPUTED)


def test_the_gradient_of_a_right_program_is_recomputed_to_the_last_bits(tmp_path: Path) -> None:
    """The control is a gradient that is written to."""
    from lockstep_trace.rules.checks import values_of

    def train(times: float) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(0, 24, 4):
            nn.functional.cross_entropy(model(X[i : i + 4].mean(1)), Y[i : i + 4]).backward()
            if i % 8:
                model[0].weight.grad *= times
                optimizer.step()
                optimizer.zero_grad()

    for times in (1.0, 1.01):
        checked(lambda times=times: train(times), tmp_path / str(times))
        (rank,) = read(tmp_path / str(times)).ranks
        (check,), step = rank.checks, rank.steps[0][1]
        assert check["backwards"] == 2
        assert check["excluded"] == {}
        again = values_of(check["recomputed"], check["of"], step.layout)
        same = {name: again[name].fingerprint == value.fingerprint for name, value in step.grads.items()}
        assert len(same) == 4
        assert [n for n, alike in same.items() if not alike] == ([] if times == 1.0 else ["0.weight"])


def test_steps_that_cannot_be_recomputed_are_reported_without_a_verdict(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(8, 2)
        model.register_forward_hook(lambda *_: None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[i : i + 4].mean(1)), Y[i : i + 4]).backward()
            optimizer.step()

    rows = [f for f in checked(train, tmp_path) if f.code.startswith("check-")]
    assert {f.level for f in rows} == {"info"}
    assert any("has a hook of the script's own" in f.what for f in rows)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (statistics_of_micro_batches, "accumulation (batch norm: each micro-batch has its own statistics)"),
        (codes_that_are_sampled, "accumulation (the model draws random numbers with dropout off"),
    ],
)
def test_micro_batches_that_cannot_be_one_batch_are_not_compared(
    tmp_path: Path, case: Callable[[], None], why: str
) -> None:
    rows = [f for f in checked(case, tmp_path) if f.code.startswith("check-")]
    assert {f.level for f in rows} == {"info"}
    assert any(why in f.what for f in rows if f.code == "check-not-made")


def test_rows_of_a_recurrent_module_may_be_time_steps(tmp_path: Path) -> None:
    rows = [f for f in checked(streams_time_first, tmp_path) if f.code == "check-rows"]
    assert {f.level for f in rows} == {"info"}


RANKS = """
import sys, torch
from torch import distributed as dist, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Model(nn.Module):
    def __init__(self, faulty=False):
        super().__init__()
        self.faulty, self.body, self.head = faulty, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(functional.dropout(self.body(x).tanh(), 0.2, self.training or self.faulty))

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3)

def plainly(faulty):
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            if faulty and rank == 1:
                for p in model.parameters():
                    p.grad.mul_(3)
            optimizer.step()
            optimizer.zero_grad()

def by_accelerate(faulty):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model(faulty and rank == 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4, shuffle=True))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

ways = [plainly]
if sys.argv[1] == "both":
    from accelerate import Accelerator
    ways.append(by_accelerate)
for train in ways:
    for faulty in (False, True):
        torch.manual_seed(3 + rank)
        train(faulty)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_faulty_rank_of_two_is_named_and_correct_ones_are_not(tmp_path: Path) -> None:
    """DistributedDataParallel and Accelerate, each with accumulation: right, and with a fault on rank 1."""
    ways = "both" if importlib.util.find_spec("accelerate") else "plain"
    (tmp_path / "train.py").write_text(RANKS)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", ways]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_trace", "record", "--check", "1", "-o", "a", "--", *start],
        cwd=tmp_path,
        env=lockstep_environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "a")
    assert [e["text"] for rank in trace.ranks for e in rank.errors] == []
    told = {o: [f for f in checks.checked(trace, o) if f.level == "suspicious"] for o in trace.optimizers}
    assert all(c["of"] and c["backwards"] == 2 for rank in trace.ranks for c in rank.checks)
    assert all(r["result"] == "same" for k in trace.ranks for c in k.checks if c["opt"] == 0 for r in c["references"])
    assert [f.code for f in told[0]] == []
    assert [f.code for f in told[1]] == ["check-gradient"]
    assert "rank 1: " in told[1][0].what
    assert "it is 3 times the recomputed one" in told[1][0].what
    if ways == "both":
        assert [f.code for f in told[2]] == []
        assert [f.code for f in told[3]] == ["check-seed"]
        assert "step 1, rank 1: in evaluation mode outputs depend on the seed" in told[3][0].what
        assert "[check-seed] suspicious: step 1, rank 1" in done.stderr  # without --verbose, as --check asked for it


def test_steps_to_check_can_be_chosen_from_python(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, tmp_path, check=[0, 2]):
        for i in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[i : i + 4].mean(1)), Y[i : i + 4]).backward()
            optimizer.step()
    (rank,) = read(tmp_path).ranks
    assert [c["step"] for c in rank.checks] == [0, 2]
    callback: Any = lockstep_trace.Callback(check=[3])
    assert callback._recording.check == (3,)


def test_a_model_is_freed_and_a_group_left_as_without_the_tracer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that a script keeps does not keep the model. `destroy_process_group` first waits for late owners of a
    collective's tensor, as gloo's threads are, but not for one that the script has used elsewhere."""
    monkeypatch.setattr(observers, "RELEASED_S", 0.5)
    tracer.begin(Settings(str(tmp_path / "trace"), check=(0,)))
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model(X[:4].mean(1)), Y[:4])
    loss.backward()
    optimizer.step()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
    for late in (0.1, None):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{late}", rank=0, world_size=1)
        value, owners = torch.ones(1), list[torch.Tensor]()
        dist.all_reduce(value)
        owners.append(torch.ones(1, requires_grad=True) * value)
        timer = threading.Timer(late or 60, owners.clear)
        timer.start()
        began = time.monotonic()
        dist.destroy_process_group()
        timer.cancel()
        assert (owners == []) is bool(late)
        assert time.monotonic() - began < 30
    tracer.end()
    assert read(tmp_path / "trace").ranks[0].errors == []


def test_a_negative_step_is_refused() -> None:
    assert checked_steps([5, 1, 1]) == (1, 5)
    with pytest.raises(TraceError) as error:
        checked_steps([-1])
    assert "LS9190" in str(error.value)
    assert "-1" in str(error.value)


class Guess(nn.Module):
    """Returns its own loss, a mean over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(guess, labels), "guess": guess}


class Swallowing(Guess):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


@pytest.mark.parametrize("model", [Guess, Swallowing])
def test_a_forward_that_swallows_trainers_divisor_is_reported(model: type[Guess], tmp_path: Path) -> None:
    """Trainer does not divide by the micro-batches where forward takes any keyword (tests/assumptions)."""
    from transformers import Trainer, TrainingArguments

    rows = [{"x": torch.tensor([float(i)]), "labels": torch.tensor(1.0)} for i in range(16)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    options = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, max_grad_norm=0.0, **quiet, **sizes)
    trainer = Trainer(model(), options, train_dataset=rows)  # type: ignore[arg-type]
    codes = [f.code for f in checked(trainer.train, tmp_path / "trace") if f.level != "info"]
    assert ("check-accumulation" in codes) is (model is Swallowing)
