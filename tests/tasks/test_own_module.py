"""The task `module`: a model, data and a loss of one's own; what is found out about them, and what is refused."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lockstep.config.run import Run, RunError
from lockstep.data.job import Job
from lockstep.tasks.module import Module
from lockstep.tasks.modules import dataset
from lockstep.training.resolve import Machine, resolve
from support.messages import raises
from support.own_modules import TOY, found_of, job
from support.places import ROOT


@pytest.mark.parametrize(
    ("loss", "kind", "each"),
    [
        ("((outputs - answers) ** 2).sum()", "sum", 1),
        ("torch.nn.functional.mse_loss(outputs, answers)", "mean", 1),
        ("torch.nn.functional.mse_loss(outputs, answers, reduction='none')", "each", 2),
        ("((outputs - answers) ** 2).sum(-1)", "each", 1),
    ],
)
def test_reduction_of_a_loss_is_inferred(loss: str, kind: str, each: int, module_folder: Path) -> None:
    found = found_of(job(module_folder, TOY.replace("LOSS", loss)))
    assert (found["loss"], found["each"]) == (kind, each)
    assert found["doubts"] == []


IDLE = """

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(3, 2), nn.Linear(3, 2)
        self.other.bias.requires_grad_(False)

    def forward(self, inputs):
        return self.used(inputs)


def build():
    return Two()
"""


def test_weights_that_no_loss_depends_on_are_noted(module_folder: Path) -> None:
    """They are trained in silence, to no effect."""
    code = TOY.replace("LOSS", "((outputs - answers) ** 2).sum()")
    assert found_of(job(module_folder, code))["notes"] == []
    (note,) = found_of(job(module_folder, code + IDLE))["notes"]
    assert note.startswith("task.model: in 13 examples the loss depends on none of 1 of 3 weights")
    assert "other.weight" in note


def test_an_adapter_that_is_never_computed_is_refused(module_folder: Path) -> None:
    """As peft's layers, this one holds the layer that it wraps as `base_layer`."""
    other = "nn.MultiheadAttention(3, 1)\n        self.other.out_proj.base_layer = nn.Linear(3, 3)"
    code = IDLE.replace("nn.Linear(3, 2)\n        self.other.bias.requires_grad_(False)", other)
    with raises("LS3414", "task.model", "other.out_proj"):
        found_of(job(module_folder, TOY.replace("LOSS", "((outputs - answers) ** 2).sum()") + code))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("((outputs - answers) ** 2).sum() ** 0.5", "neither a sum nor a mean over targets"),
        ("outputs.sum() * 0", "neither a sum"),
        ("(outputs ** 2).sum() / (answers ** 2).sum()", "a mean, but not over examples"),
        ("(outputs * float('nan')).sum()", "not finite"),
        ("float(outputs.sum())", "expected a tensor of floats, but the function returned a float"),
        ("outputs.flatten()[: len(outputs) + 1] ** 2", "number of targets is unknown"),
        ("outputs.missing", "task.loss: TOY.loss failed: AttributeError: 'Tensor' object has no attribute 'missing' "),
    ],
)
def test_a_loss_that_is_neither_sum_nor_mean_is_refused(loss: str, said: str, module_folder: Path) -> None:
    run = job(module_folder, TOY.replace("LOSS", loss))
    with pytest.raises(RunError) as caught:
        found_of(run)
    assert said.replace("TOY", str(run.task.options["loss"]).partition(".")[0]) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (("batch_size=16",), "last step of an epoch (3 examples)"),
        (("batch_size=16", "steps=3"), ""),
        (("batch_size=17",), ""),
    ],
)
def test_batch_norm_of_a_lone_item_is_refused(keys: tuple[str, ...], refused: str, module_folder: Path) -> None:
    """51 items in 4 micro-batches per step leave one item alone."""
    code = TOY.replace("LOSS", "((outputs - answers) ** 2).sum()").replace("nn.Tanh()", "nn.BatchNorm1d(8)")
    run = job(module_folder, code, *keys)
    with raises("LS3007", refused) if refused else nullcontext():
        resolve(run, Machine(), 1)


def test_losses_with_parameters_are_refused(module_folder: Path) -> None:
    """Nothing would train it, and the numbers would look like training."""
    code = TOY.replace("LOSS", "0")
    trained = code + "\n\nloss = torch.nn.Bilinear(2, 2, 1)\n"
    with raises("LS3202"):
        found_of(job(module_folder, trained))
    frozen = code + "\n\nloss = torch.nn.HuberLoss()\n"
    assert found_of(job(module_folder, frozen))["loss"] == "mean"


def test_a_sum_that_depends_on_other_examples_is_noted(module_folder: Path) -> None:
    loss = "((outputs - outputs.mean(0)) ** 2).sum()"
    assert "not the sum of both" in found_of(job(module_folder, TOY.replace("LOSS", loss)))["doubts"][0]


def test_the_example_of_the_page(module_folder: Path) -> None:
    page = (ROOT / "docs/how-to/own-module.md").read_text()
    (module_folder / "my_file.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    values = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert found_of(Run.load(values))["loss"] == "mean"


def test_a_list_of_modules_is_a_row_of_them(module_folder: Path) -> None:
    code = (
        TOY.replace("LOSS", "outputs.sum()")
        .replace("nn.Sequential(", "[")
        .replace("nn.Linear(8, 2))", "nn.Linear(8, 2)]")
    )
    assert isinstance(dataset.model(dataset.OwnCode.of(job(module_folder, code))), torch.nn.Sequential)


METRICS = {
    "{'a': (outputs > 0).float().mean()}": {"a": "mean"},
    "{'a': (outputs > 0).sum(), 'b': (outputs > 0).float(), 'c': (outputs.sum(), 3)}": {
        "a": "sum",
        "b": "each",
        "c": "pair",
    },
    "{'a': outputs.median()}": "a is neither a sum over examples nor their mean; return one number per example",
    "{'a': outputs.sum() * 0}": "a is 0 for the tried items",
    "{'loss': outputs.sum()}": "LS3237",
    "outputs": "the function returned a tensor of shape [8, 2]",
}


@pytest.mark.parametrize("metrics", METRICS)
def test_reduction_of_a_metric_is_inferred(metrics: str, module_folder: Path) -> None:
    code = TOY.replace("LOSS", "outputs.sum()") + f"\n\ndef metrics(outputs, answers):\n    return {metrics}\n"
    run, wanted = job(module_folder, code, functions=("metrics",)), METRICS[metrics]
    if isinstance(wanted, dict):
        assert found_of(run)["metrics"] == wanted
        return
    with pytest.raises(RunError) as caught:
        found_of(run)
    assert wanted in str(caught.value)


def test_loss_over_ragged_items_needs_target_counts(module_folder: Path) -> None:
    code = RAGGED.replace("REDUCTION", "mean")
    with raises("LS3234", "task.targets"):
        found_of(job(module_folder, code, functions=("collate",)))
    assert found_of(job(module_folder, code, functions=("collate", "targets")))["loss"] == "mean"
    with raises("LS3231"):
        found_of(job(module_folder, RAGGED.replace("REDUCTION", "none"), functions=("collate",)))
    run = job(module_folder, RAGGED.replace("REDUCTION", "none"), functions=("collate", "targets", "length"))
    task = Module(run).opened(Job.of(run).with_data().data)
    columns = task.splits["train"]
    assert columns.lengths.tolist() == [int(n) + 1 for n in columns.targets]  # type: ignore[attr-defined]
    micro = task.collate(columns, np.array([3, 0]), 0)
    assert int((micro.targets >= 0).sum()) == task.count_targets(columns, np.array([3, 0]))


RAGGED = """
import torch
from torch import nn


def build():
    return nn.Embedding(5, 5)


def data():
    return [torch.randint(1, 5, (int(n),)) for n in torch.randint(1, 9, (40,))]


def collate(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def targets(item):
    return len(item)


def length(item):
    return len(item) + 1


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.transpose(1, 2), batch, ignore_index=0, reduction="REDUCTION")
"""


KEPT = """
import torch
from torch import nn

PAD = 0


def build():
    return BUILD


def data():
    sizes = [int(n) for n in torch.randint(1, 9, (60,))]
    return DATA


def collate(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def loss(outputs, batch):
    return LOSS


def metrics(outputs, batch):
    return {"surprise": nn.functional.cross_entropy(outputs.transpose(1, 2), batch, ignore_index=PAD)}
"""
TAGGER = "nn.Sequential(nn.Embedding(20, 16), nn.Tanh(), nn.Linear(16, 20))"
SMALL = "nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), Small(16, 20))"  # whose first outputs are all alike
SMALL_CLASS = """

class Small(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=1e-4)
        nn.init.zeros_(self.bias)
"""
RECURRENT = "nn.Sequential(nn.Embedding(20, 4), nn.LSTM(4, 5, batch_first=True), First())"
RAGGED_ITEMS = "[torch.randint(1, 20, (n,)) for n in sizes]"
FILLED_ITEMS = "[torch.cat([torch.randint(1, 20, (n,)), torch.zeros(9 - n, dtype=torch.int64)]) for n in sizes]"
SMOOTH = "nn.functional.cross_entropy(outputs.transpose(1, 2), batch, ignore_index=PAD, label_smoothing=0.1)"
BY_WEIGHT = "nn.functional.cross_entropy(outputs[:, 0], batch[:, 0] % 2, weight=torch.tensor([5.0, 1.0] + [0.0] * 18))"


@pytest.mark.parametrize("build", [TAGGER, SMALL], ids=["tagger", "small"])
@pytest.mark.parametrize(
    ("loss", "items"),
    [(SMOOTH, RAGGED_ITEMS), (SMOOTH, FILLED_ITEMS), (BY_WEIGHT, FILLED_ITEMS)],
    ids=["ragged", "filled", "class weights"],
)
def test_mean_over_kept_targets_is_distinguished_from_mean_over_examples(
    build: str, loss: str, items: str, module_folder: Path
) -> None:
    """A mean over kept targets is recognized, even if the untrained model has equal losses for all targets."""
    code = (KEPT + SMALL_CLASS).replace("BUILD", build).replace("DATA", items).replace("LOSS", loss)
    with raises("LS3234", "task.targets"):
        found_of(job(module_folder, code, functions=("collate",)))
    kept = code + "\n\ndef targets(item):\n    return int((item != PAD).sum())\n"
    if loss == SMOOTH:
        assert found_of(job(module_folder, kept, functions=("collate", "targets")))["loss"] == "mean"
        with pytest.raises(RunError) as caught:
            found_of(job(module_folder, kept, functions=("collate", "targets", "metrics")))
        assert caught.value.code in ("LS3235", "LS3240")  # a mean, but not over examples; neither a sum nor a mean


@pytest.mark.parametrize(
    ("loss", "build"),
    [
        ("nn.functional.cross_entropy(outputs[:, 0], batch[:, 0])", TAGGER),
        (
            "((outputs.flatten(1) - 1) ** 2).mean()",
            "nn.Sequential(nn.Embedding(20, 4), nn.LSTM(4, 5, batch_first=True), First())",
        ),
        ("-outputs.log().flatten(1).mean(1).mean()", "nn.Sequential(nn.Embedding(20, 8), nn.Sigmoid())"),
        ("outputs.exp().flatten(1).mean(1).mean()", "nn.Sequential(nn.Embedding(20, 8), Cube())"),
    ],
    ids=["classes", "recurrent", "probabilities", "overflows"],
)
def test_mean_over_examples_is_recognized(loss: str, build: str, module_folder: Path) -> None:
    more = "\n\nclass First(nn.Module):\n    def forward(self, both):\n        return both[0]\n"
    more += "\n\nclass Cube(nn.Module):\n    def forward(self, x):\n        return x**3 / 2\n"
    code = (KEPT + more).replace("BUILD", build).replace("DATA", FILLED_ITEMS).replace("LOSS", loss)
    assert found_of(job(module_folder, code, functions=("collate",)))["loss"] == "mean"


RARE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    return nn.Linear(3, 2)


def data():
    return TensorDataset(torch.randn(500, 3), (torch.arange(500) == 3).long())


loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, WEIGHT]))
"""


def test_weights_of_a_class_that_no_item_of_the_trial_has_are_seen(module_folder: Path) -> None:
    with raises("LS3234"):
        found_of(job(module_folder, RARE.replace("WEIGHT", "9.0")))
    assert found_of(job(module_folder, RARE.replace("WEIGHT", "1.0")))["loss"] == "mean"


@pytest.mark.parametrize("state", ["self.dice.random()", "next(self.count)"])
def test_items_that_change_when_read_again_are_noted(state: str, module_folder: Path) -> None:
    code = TOY.replace("LOSS", "outputs.sum()").partition("def data")[0] + UNSTEADY.replace("STATE", state)
    assert "differs when it is read again" in found_of(job(module_folder, code))["doubts"][0]
    assert (
        found_of(job(module_folder, code.replace(state, "random.random() + np.random.rand() + torch.rand(())")))[
            "doubts"
        ]
        == []
    )


UNSTEADY = """
import itertools


class Items(Dataset):
    def __init__(self):
        self.dice, self.count = np.random.default_rng(0), itertools.count()

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return torch.ones(3) * (STATE), i


def data():
    return Items()


def loss(outputs, numbers):
    return outputs.sum()
"""
