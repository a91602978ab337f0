"""Assumptions about tensors, modules and hooks of torch: ties, empty inputs, dtypes, order, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.assumed import rests_on_it


@rests_on_it(
    "src/lockstep/tasks/models/qa_spans.py",
    "src/lockstep/tasks/models/inference.py",
    "src/lockstep/tasks/objectives/one_label.py",
    "src/lockstep/tasks/masked_language_modeling.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/token_checks.py",
    "src/lockstep/plain/scores.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/per_token.py",
    "src/lockstep/tasks/token_classification.py",
)
def test_argmax_and_max_return_the_first_of_equal_values() -> None:
    """On a CPU argmax and max along a dimension return the first index of equal values, also of -inf, at odd sizes, in
    bfloat16 and float32. A NaN counts as the greatest value. topk is in descending order."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 7, 70, 1003):
            rows = torch.zeros(3, size, dtype=dtype)
            rows[1], rows[2, size // 2 :] = -torch.inf, 2.0
            for places in (rows.argmax(1), rows.max(1).indices):
                assert places.tolist() == [0, 0, size // 2]
    assert torch.tensor([1.0, float("nan"), 3.0]).argmax() == 1
    assert torch.tensor([1.0, 4.0, 3.0]).topk(2).values.tolist() == [4.0, 3.0]


@rests_on_it(
    "src/lockstep/tasks/objectives/one_label.py",
    "src/lockstep/tasks/objectives/several_labels.py",
    "src/lockstep/tasks/objectives/regression.py",
    "src/lockstep/tasks/preference.py",
    "src/lockstep/tasks/reward.py",
    "src/lockstep/tasks/models/pooling.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/tasks/embedding.py",
)
def test_losses_of_extreme_and_empty_logits() -> None:
    """logsigmoid, binary_cross_entropy_with_logits and logsumexp do not overflow. cross_entropy of no rows is 0, or
    empty with reduction none; one_hot of an empty tensor has its columns. cross_entropy with a score of -inf is finite
    if the target's score is. normalize of a zero vector is zero, with a finite gradient."""
    assert functional.logsigmoid(torch.tensor([-1e4, 1e4])).tolist() == [-1e4, 0.0]
    pairs = torch.tensor([1e4, -1e4]), torch.tensor([0.0, 1.0])
    assert functional.binary_cross_entropy_with_logits(*pairs, reduction="none").tolist() == [1e4, 1e4]
    assert torch.tensor([[1e4, -torch.inf]]).logsumexp(1).tolist() == [1e4]
    none = torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
    assert functional.cross_entropy(*none, reduction="sum").item() == 0
    assert functional.cross_entropy(*none, reduction="none").shape == (0,)
    assert functional.one_hot(none[1], 3).shape == (0, 3)
    scores = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    functional.cross_entropy(scores, torch.tensor([0]), reduction="none").sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[-0.5, 0.0, 0.5]]
    zero = torch.zeros(1, 3, requires_grad=True)
    unit = functional.normalize(zero, dim=-1)
    unit.sum().backward()
    assert not unit.any()
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


@rests_on_it(
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/unpadded.py",
    "src/lockstep/tasks/classification.py",
    "src/lockstep/tasks/objectives/one_label.py",
    "src/lockstep/tasks/objectives/several_labels.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/proof/against_plain.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/masked_language_modeling.py",
    "src/lockstep/tasks/models/head_padding.py",
    "src/lockstep/tasks/models/quantized.py",
    "src/lockstep/tasks/models/storage_dtype.py",
    "src/lockstep/tasks/token_classification.py",
)
def test_operations_outside_autocast() -> None:
    """Under autocast on a CPU a matrix product is bfloat16; of float64 it stays float64, and within
    autocast(enabled=False) float32. softmax, logsumexp and logsigmoid of bfloat16 stay bfloat16, so lockstep casts
    logits first. is_autocast_enabled and get_autocast_dtype take the device type."""
    square = torch.ones(2, 2)
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (False, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        low = square @ square
        assert (low.dtype, (square.double() @ square.double()).dtype) == (torch.bfloat16, torch.float64)
        with torch.autocast("cpu", enabled=False):
            assert (square @ square).dtype == torch.float32
        others = low.softmax(-1), low.logsumexp(-1), functional.logsigmoid(low)
        assert {each.dtype for each in others} == {torch.bfloat16}
    assert torch.get_autocast_dtype("cuda") == torch.float16


@rests_on_it(
    "src/lockstep/tasks/models/masks.py",
    "src/lockstep/data/host_facts.py",
    "src/lockstep/tasks/preference.py",
    "src/lockstep/data/batch.py",
    "src/lockstep/tasks/models/storage_dtype.py",
)
def test_views_bool_masks_and_diff() -> None:
    """_base of a view, also of a view of a view, is the original tensor; of a copy it is None. bool() of an integer
    mask returns another object. int64 values viewed as float64 and back keep their bits. diff with prepend keeps the
    length."""
    whole = torch.ones(6)
    assert whole[:2]._base is whole
    assert whole.view(2, 3)[:1]._base is whole
    assert whole.clone()._base is None
    numbers = torch.tensor([[3.5, float("nan")]], dtype=torch.float64)
    bits = numbers.view(torch.int64)
    assert torch.equal(bits[:, -1].contiguous().view(torch.float64).view(torch.int64), bits[:, -1])
    places = torch.tensor([[0, 1, 0, 1]])
    assert (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1).tolist() == [[0, 0, 1, 1]]


@rests_on_it(
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/storage_dtype.py",
    "src/lockstep/tasks/models/head_padding.py",
    "src/lockstep/tasks/models/repeatable.py",
    "src/lockstep/plain/scores.py",
    "src/lockstep/proof/replay_rank.py",
    "src/lockstep/tasks/models/masks.py",
    "src/lockstep/tasks/models/small_models.py",
    "src/lockstep/tasks/models/token_rows.py",
    "src/lockstep/tasks/models/unpadded.py",
    "src/lockstep/tasks/modules/loss_probe.py",
)
def test_hooks_registered_during_a_forward() -> None:
    """A hook that a model's pre-hook registers on a submodule runs in the same forward, after earlier hooks, and can
    remove itself. A forward set on the object is what a call runs, with the hooks around it."""
    order: list[str] = []
    part = nn.Linear(2, 2)
    whole = nn.Sequential(part)
    part.forward = lambda input: input * 3  # type: ignore[method-assign]
    part.register_forward_hook(lambda *_: order.append("first"))

    def begin(*_: Any) -> None:
        def last(module: Any, args: Any, output: Any) -> None:
            order.append("last")
            handle.remove()

        handle = part.register_forward_hook(last)

    whole.register_forward_pre_hook(begin)
    for _ in range(2):
        assert whole(torch.ones(2)).tolist() == [3.0, 3.0]
    assert order == ["first", "last"] * 2
    assert len(part._forward_hooks) == 1


@rests_on_it("src/lockstep/tasks/models/repeatable.py")
def test_custom_operations_and_embedding_backward() -> None:
    """A custom_op has the gradient of register_autograd, and on the meta device the shape of register_fake.
    embedding_dense_backward gives the bits of an embedding's gradient, with the padding row zero."""

    @torch.library.custom_op("lockstep_witness::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape)

    twice.register_autograd(lambda ctx, slope: slope * 5, setup_context=lambda ctx, inputs, output: None)
    x = torch.ones(2, requires_grad=True)
    twice(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    assert twice(torch.ones(3, 4, device="meta")).shape == (3, 4)
    ids, slope = torch.tensor([[0, 2, 2, 1]]), torch.randn(1, 4, 3)
    for padding in (None, 2):
        weight = torch.randn(4, 3, requires_grad=True)
        functional.embedding(ids, weight, padding).backward(slope)
        kernel = torch.ops.aten.embedding_dense_backward(slope, ids, 4, -1 if padding is None else padding, False)
        assert weight.grad is not None
        assert torch.equal(kernel, weight.grad)
        assert bool(kernel[2].any()) is (padding is None)


@rests_on_it("src/lockstep/tasks/models/config_checks.py")
def test_a_profile_names_operations_of_forward_and_backward() -> None:
    """key_averages of a CPU profile names each operation of forward and backward as aten::NAME."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.linalg.cholesky(weight @ weight.T + torch.eye(2)).sum().backward()
    names = {entry.key.removeprefix("aten::") for entry in profile.key_averages()}
    assert {"linalg_cholesky_ex", "mm"} <= names


@rests_on_it("src/lockstep/tasks/models/unpadded.py")
def test_handle_torch_function_calls_the_subclass() -> None:
    """handle_torch_function calls __torch_function__ of the subclass among the relevant arguments, with the function,
    all arguments and keywords, and returns its result."""
    from torch.overrides import handle_torch_function

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function, args[1:], kwargs

    def attention(query: Any, size: int, *, scaling: float) -> Any:
        return handle_torch_function(attention, (query,), query, size, scaling=scaling)

    query: Any = torch.ones(1).as_subclass(Own)
    assert attention(query, 2, scaling=0.5) == (attention, (2,), {"scaling": 0.5})


@rests_on_it(
    "src/lockstep/tasks/modules/wrapped_module.py",
    "src/lockstep/proof/replay.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/lab/import_config/model_defaults.py",
    "src/lockstep/proof/against_plain.py",
    "src/lockstep/proof/recording.py",
    "src/lockstep/proof/replay_rank.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/pooling.py",
    "src/lockstep/tasks/models/source_files.py",
    "src/lockstep/tasks/models/source_ties.py",
    "src/lockstep/tasks/models/tie_entry.py",
    "src/lockstep/tasks/modules/loss_probe.py",
)
def test_loading_weights_needs_all_names_and_shapes_and_keeps_dtypes() -> None:
    """load_state_dict raises RuntimeError for a missing weight, an additional weight and another shape; with strict
    False only for the shape. It converts to the parameter's dtype. Non-persistent buffers are not in state_dict.
    named_parameters lists a shared parameter once, or with remove_duplicate=False under each name."""
    layer = nn.Linear(1, 1)
    one, whole = torch.ones(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    for wrong in ({"weight": one}, whole | {"z": one}, whole | {"weight": torch.ones(2, 1)}):
        with pytest.raises(RuntimeError):
            layer.load_state_dict(wrong)
    assert layer.load_state_dict({"weight": one, "z": one}, strict=False) == (["bias"], ["z"])
    with pytest.raises(RuntimeError):
        layer.load_state_dict({"weight": torch.ones(2, 1)}, strict=False)
    layer.load_state_dict({"weight": one.double(), "bias": torch.ones(1, dtype=torch.int64)})
    assert {each.dtype for each in layer.parameters()} == {torch.float32}
    layer.register_buffer("places", torch.ones(1), persistent=False)
    assert list(layer.state_dict()) == ["weight", "bias"]
    twice = nn.ModuleList([layer, layer])
    assert [name for name, _ in twice.named_parameters()] == ["0.weight", "0.bias"]
    assert len([*twice.named_parameters(remove_duplicate=False)]) == 4


@rests_on_it("src/lockstep/tasks/modules/wrapped_module.py")
def test_replacing_a_modules_class_and_viewing_bytes() -> None:
    """An nn.Module's __class__ can be replaced by a subclass made with type(). frombuffer views a bytearray's bytes,
    and refuses an empty one."""
    layer = nn.Linear(1, 1)
    layer.__class__ = type("Linear", (nn.Linear,), {"forward": lambda self, x: x + 1})
    assert (layer(torch.ones(1)).item(), len([*layer.parameters()])) == (2.0, 2)
    assert torch.frombuffer(bytearray(b"[]"), dtype=torch.uint8).tolist() == [91, 93]
    with pytest.raises(ValueError):
        torch.frombuffer(bytearray(), dtype=torch.uint8)


@rests_on_it(
    "src/lockstep/tasks/models/unpadded.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/data/host_facts.py",
    "src/lockstep/tasks/embedding.py",
)
def test_indexed_copies_and_sums() -> None:
    """index_copy_ writes rows to their indices in any order, and scatter_add_ adds one value per row. index_select and
    nonzero keep the order. torch.dropout with probability 0 draws random numbers, but changes nothing."""
    rows = torch.arange(6.0).view(3, 2)
    assert torch.zeros(4, 2).index_copy_(0, torch.tensor([3, 0, 1]), rows).tolist() == [[2, 3], [4, 5], [0, 0], [0, 1]]
    added = torch.ones(2, 3).scatter_add_(1, torch.tensor([[2], [0]]), torch.full((2, 1), -1.0))
    assert added.tolist() == [[1, 1, 0], [0, 1, 1]]
    assert torch.tensor([5, -1, 0]).ge(0).nonzero().flatten().tolist() == [0, 2]
    assert torch.equal(torch.dropout(rows, 0.0, train=True), rows)
    assert np.array_equal(torch.from_numpy(np.arange(3)).numpy(), [0, 1, 2])
