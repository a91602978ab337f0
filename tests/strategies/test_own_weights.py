"""User modules that use different weights for different examples: refused under ZeRO-3, and not sharded as FSDP
blocks."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.cli import main
from lockstep.strategies.engines import layers
from support.command import LOCKSTEP, ended, start
from support.marks import needs
from support.messages import mentions

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(8, 16), nn.Linear(16, 1)
        self.parts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(4)])

    def forward(self, x):
        h, which = self.first(x).relu(), (x[:, 0].abs() * 7).long() % 4
        if self.kind == "experts":
            out = torch.zeros_like(h)
            for i, part in enumerate(self.parts):
                if (rows := which == i).any():
                    out[rows] = part(h[rows])
            h = out
        elif self.kind == "branch":
            h = self.parts[0](h) if float(x[0, 0]) > 0 else self.parts[1](h)
        elif self.kind == "parameters":
            h = h * self.scales[int(which[0])]
        elif self.kind == "whole list":
            for scale in self.scales:
                h = h * scale
            if not self.training:  # another order in evaluations
                h = self.parts[0](h * self.scales[0])
        elif self.kind == "rarely":
            h = h * self.scales[int((x[:, 0] > 50).any())]
        elif self.kind == "rarely outside":
            h = self.parts[1](self.parts[0](h))
            h = h @ self.parts[int((x[:, 0] > 50).any())].weight
        else:
            for part in self.parts:
                h = h + part(h)
        return self.last(h)


def data():
    x = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
    x[43, 0] = 100
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(outputs, answers):
    return (outputs - answers).square().sum()
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "own_weights.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    task = "{name: module, model: own_weights.Own, data: own_weights.data, loss: own_weights.loss, model_arguments: "
    (tmp_path / "run.yaml").write_text(f"task: {task}{{kind: KIND}}}}\nsteps: 2\nbatch_size: 8\nmicro_batches: 4\n")
    return ["launch.device=cpu", "launch.processes=2"]


def planned(kind: str, strategy: str, words: list[str]) -> int:
    path = Path("run.yaml")
    path.write_text(path.read_text().replace("KIND", kind))
    return main(["plan", str(path), f"strategy.name={strategy}", *words])


@pytest.mark.parametrize(("kind", "name"), [("experts", "parts.0"), ("branch", "parts.0"), ("parameters", "scales.0")])
def test_zero3_refuses_weights_that_some_examples_do_not_use(
    kind: str, name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the refusal, ranks gathered different weights at the same moment, and gloo ended in SIGABRT."""
    needs("deepspeed")
    assert planned(kind, "zero3", words) == 2
    assert mentions(capsys.readouterr().err, "LS4410", name)


@pytest.mark.parametrize(("kind", "strategy"), [("all", "zero3"), ("experts", "ddp"), ("experts", "fsdp2")])
def test_supported_uses_of_own_weights_are_planned(kind: str, strategy: str, words: list[str]) -> None:
    if strategy == "zero3":
        needs("deepspeed")
    assert planned(kind, strategy, words) == 0


@pytest.mark.processes
def test_a_parameter_list_that_every_forward_uses_trains(words: list[str], cache: Path) -> None:
    """Backward once had a weight without elements: autograd kept an entry that DeepSpeed had freed."""
    needs("deepspeed")
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("KIND", "whole list"))
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    hashes = []
    for strategy in ("ddp", "zero3"):
        command = [*LOCKSTEP, "train", "run.yaml", f"strategy.name={strategy}", f"output={strategy}", *words]
        status, _, err = ended(start(command, Path.cwd(), cache, PYTHONPATH=paths))
        assert status == 0, err
        hashes.append((Path(strategy) / "export" / "model.safetensors").read_bytes())
    assert hashes[0] == hashes[1]
    command = [*LOCKSTEP, "train", "run.yaml", "strategy={name: zero3, exact: false}", "output=loose", *words]
    status, _, err = ended(start(command, Path.cwd(), cache, PYTHONPATH=paths))
    assert status == 2
    assert mentions(err, "LS4430", "scales.0", "zero2")


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "name"), [("rarely", "scales.1"), ("rarely outside", "parts.1.weight")])
def test_unplanned_weight_use_ends_with_one_message(kind: str, name: str, words: list[str], cache: Path) -> None:
    """One row of 80 uses another list entry, or reads another weight. Ranks must end with one message; gloo once ended
    in SIGABRT."""
    needs("deepspeed")
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("KIND", kind))
    # otherwise that row would be among those that the plan tries
    assert main(["plan", "run.yaml", "strategy.name=zero3", *words]) == 0
    command = [*LOCKSTEP, "train", "run.yaml", "strategy.name=zero3", "steps=20", *words]
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, out, err = ended(start(command, Path.cwd(), cache, PYTHONPATH=paths))
    assert status == 1
    assert mentions(err, "LS4410", name, "rank ")
    assert "Traceback" not in err + out
    assert err.count("lockstep: ") == 1
    assert "SIGABRT" not in err + out


class Turns(nn.Module):
    """Calls its parts in a configurable order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.order, self.entry, self.outside = "ab", 0, False
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for name in self.order:
            x = getattr(self, name)(x)
        x = x * self.scales[self.entry]
        return x @ self.a.weight if self.outside else x


@pytest.mark.parametrize("order", ["ba", "a", "b", "aab", "abb", ""])
def test_gathering_out_of_order_ends_the_rank(order: str) -> None:
    model, x = Turns(), torch.zeros(1, 2)
    names = layers.call_order(model, lambda: model(x))
    assert names == ["a", "b", "scales.0"]
    assert type(model.a._parameters) is dict
    _in_deepspeeds_dictionaries(model)
    layers.hold_to(model, names)
    model(x)
    model.order = order
    with pytest.raises(layers.OtherWeights, match="ZeRO-3 gathers"):
        model(x)
    model.eval()
    model(x)
    model.train().order = "ab"
    model(x)


class Ordered(OrderedDict[str, Any]):
    """An OrderedDict subclass, in place of DeepSpeed's own."""


def _in_deepspeeds_dictionaries(model: nn.Module) -> None:
    for module in model.modules():
        module._parameters = Ordered(module._parameters)


@pytest.mark.parametrize("change", ["entry", "outside"])
def test_reading_a_weight_out_of_order_ends_the_rank(change: str) -> None:
    model, x = Turns(), torch.zeros(1, 2)
    names = layers.call_order(model, lambda: model(x))
    _in_deepspeeds_dictionaries(model)
    layers.hold_to(model, names)
    model(x)
    setattr(model, change, 1)
    with pytest.raises(layers.OtherWeights, match="scales.1" if change == "entry" else "a.weight"):
        model(x)
    model.eval()
    model(x)
    model.train()
    setattr(model, change, 0)
    model(x)
    assert [*model.state_dict()] == [n for n, _ in model.named_parameters()]
