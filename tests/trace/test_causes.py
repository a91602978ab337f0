"""Causes that `diff` names where two traces see the same inputs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep_trace import tracer
from lockstep_trace.compare_traces import Comparison, compare_traces
from lockstep_trace.findings import findings, proved
from lockstep_trace.read import read
from lockstep_trace.tracer import Settings

X = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1))
Y = X[..., :3].argmax(-1)


class Labelled(nn.Module):
    """A model that computes its loss from labels, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.layer(x), labels)


def train(
    folder: Path,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    model: nn.Module,
    anew: int = 99,
    drawn: bool = False,
) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape))
            parameter.mul_(1.1 if drawn else 1)
    tracer.begin(Settings(str(folder)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        if i == anew:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    tracer.end()


def cross(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def verdict(folder: Path, other: Callable[[nn.Module, Tensor, Tensor], Tensor], anew: int = 99) -> Comparison:
    train(folder / "a", cross, nn.Linear(5, 3))
    train(folder / "b", other, nn.Linear(5, 3), anew)
    return compare_traces(read(folder / "a"), read(folder / "b"))


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda m, x, y: cross(m, x, y.roll(1)), "the same targets in another order"),
        (lambda m, x, y: cross(m, x, (y + 1) % 3), "the loss other targets"),
        (lambda m, x, y: cross(m, x, y.masked_fill(y == 2, -100)), "labels are masked differently"),
        (
            lambda m, x, y: functional.mse_loss(m(x).softmax(-1), functional.one_hot(y, 3).float()),
            "the loss function differs: squared error here, cross entropy in the reference",
        ),
        (lambda m, x, y: functional.cross_entropy(m(x).softmax(-1), y), "is computed differently"),
        (smoothed, "label smoothing"),  # the control: only the function's options differ
    ],
)
def test_a_different_loss_is_recognized_by_its_graph(
    tmp_path: Path, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], cause: str
) -> None:
    result = verdict(tmp_path, loss)
    assert result.first == "loss"
    assert cause in result.cause, result.cause


@pytest.mark.parametrize("labels", [True, False])
def test_other_labels_are_not_another_order(tmp_path: Path, labels: bool) -> None:
    """The control sees other inputs."""

    def other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x, labels=(y + 1) % 3) if labels else model(x + 1, labels=y)  # type: ignore[no-any-return]

    train(tmp_path / "a", lambda m, x, y: m(x, labels=y), Labelled())  # type: ignore[no-any-return]
    train(tmp_path / "b", other, Labelled())
    result = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert result.first == "examples"
    assert ("the same inputs with other labels" in result.cause) is labels
    assert ("in another order" in result.cause) is not labels


def test_another_precision_is_named_where_losses_agree(tmp_path: Path) -> None:
    def constant(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return 1 + ((z - z.detach()) * x[:, :3]).sum()

    def in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return constant(model, x, y)

    train(tmp_path / "a", constant, nn.Linear(5, 3))
    train(tmp_path / "b", in_half, nn.Linear(5, 3))
    result = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert result.first == "gradient"
    assert "different precisions" in result.cause, result.cause


@pytest.mark.parametrize("drawn", [False, True])
def test_weights_that_differ_by_their_dtype(drawn: bool, tmp_path: Path) -> None:
    """Nothing was drawn or loaded otherwise. The control: a layer that was."""

    class Kept(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).float()

    train(tmp_path / "a", cross, nn.Sequential(Kept(5, 5), Kept(5, 3)))
    train(tmp_path / "b", cross, nn.Sequential(Kept(5, 5), Kept(5, 3)).bfloat16(), drawn=drawn)
    result = compare_traces(read(tmp_path / "a"), read(tmp_path / "b"))
    assert result.first == "start weights"
    same = "the same weights, stored in bfloat16 here and in float32 in the reference"
    assert (same in result.cause) is not drawn, result.cause
    one, other = read(tmp_path / "a"), read(tmp_path / "b")
    idle = replace(other.ranks[0], starts={}, steps={})  # a rank without weights in this optimizer
    assert compare_traces(one, replace(other, ranks=(*other.ranks, idle))).cause == result.cause


def test_a_recreated_optimizer_is_named(tmp_path: Path) -> None:
    result = verdict(tmp_path, cross, anew=4)
    assert "after 4 steps the optimizer is recreated here" in result.cause


def test_weight_tied_in_one_model_only_is_named(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
            if tied:
                self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x))  # type: ignore[no-any-return]

    for name, tied in (("apart", False), ("tied", True)):
        train(tmp_path / name, cross, Two(tied))
    apart, tied_ = (read(tmp_path / name) for name in ("apart", "tied"))
    assert (
        "tied to another parameter in the reference, and not here: tie it again" in compare_traces(tied_, apart).cause
    )
    assert "tied to another parameter here, and not in the reference: it was tied" in compare_traces(apart, tied_).cause


@pytest.mark.parametrize("masked", [True, False])
def test_packed_rows_are_proved_by_positions_and_the_mask_of_attention(tmp_path: Path, masked: bool) -> None:
    """The control cuts the rows at the documents."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            x = self.embed(ids)[:, None]
            document = (position_ids == 0).cumsum(-1)
            mask = (document[:, None, :] == document[:, :, None]) & torch.ones(8, 8, dtype=torch.bool).tril()
            out = functional.scaled_dot_product_attention(
                x, x, x, attn_mask=mask[:, None] if masked else None, is_causal=not masked
            )
            return self.head(out[:, 0])  # type: ignore[no-any-return]

    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
    tracer.begin(Settings(str(tmp_path)))
    for ids in torch.randint(0, 20, (4, 2, 8), generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        out = model(ids, position_ids=positions)
        functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    tracer.end()
    assert [f.code for f in proved(findings(read(tmp_path)))] == ([] if masked else ["packed-rows"])


@pytest.mark.parametrize("masks", [None, "ones", "numbers"])
@pytest.mark.parametrize("cut", [True, False])
def test_packed_rows_of_a_model_of_transformers_are_proved_unless_it_cuts_them(
    tmp_path: Path, cut: bool, masks: str | None
) -> None:
    """transformers separates the texts of a row where positions restart, if use_cache is False and no mask is given; a
    mask of ones separates nothing. A mask that numbers the texts has an effect only if the model reads it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"use_cache": False} if cut else {}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
    if masks is not None:
        options["attention_mask"] = torch.ones_like(positions) + (masks == "numbers") * (positions.cumsum(1) > 6)
    tracer.begin(Settings(str(tmp_path)))
    for ids in torch.randint(0, 20, (3, 2, 8), generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        model(ids, position_ids=positions, labels=ids, **options).loss.backward()
        optimizer.step()
    tracer.end()
    right = masks == "numbers" or (cut and masks is None)
    assert [f.code for f in proved(findings(read(tmp_path)))] == ([] if right else ["packed-rows"])
