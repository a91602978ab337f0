"""Assumptions of lockstep-trace about the nodes of autograd's graphs: their names, and what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.assumed import rests_on_it


def name_of(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def before(node: Any, place: int = 0) -> Any:
    return node.next_functions[place][0]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/evidence.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
)
def test_nodes_of_views_hold_axes_and_sizes() -> None:
    """View holds the input size as `_saved_self_sym_sizes`, Permute holds `_saved_dims`, Transpose `_saved_dim0` and
    `_saved_dim1`; negative values may appear as unsigned numbers. T holds nothing. Cat has an input node for each part.
    Select holds the input size, and its axis and index.
    """
    x = torch.ones(2, 3, 4, requires_grad=True)

    def signed(number: int) -> int:
        return number - (1 << 64 if number >= 1 << 63 else 0)

    view: Any = x.view(6, 4).grad_fn
    assert (name_of(view), list(view._saved_self_sym_sizes)) == ("View", [2, 3, 4])
    last: Any = x[:, -1].grad_fn
    assert (name_of(last), list(last._saved_self_sym_sizes), last._saved_dim) == ("Select", [2, 3, 4], 1)
    assert signed(int(last._saved_index)) % 3 == 2
    moved: Any = x.permute(2, 0, -2).grad_fn
    assert (name_of(moved), [signed(int(n)) % 3 for n in moved._saved_dims]) == ("Permute", [2, 0, 1])
    turned: Any = x.transpose(-1, 0).grad_fn
    assert name_of(turned) == "Transpose"
    assert {signed(int(n)) % 3 for n in (turned._saved_dim0, turned._saved_dim1)} == {0, 2}
    assert name_of(x[0].t().grad_fn) == "T"
    joined = torch.cat([x[0], x[1][:1]])
    assert name_of(joined.grad_fn) == "Cat"
    assert len(joined.grad_fn.next_functions) == 2  # type: ignore[union-attr]
    inner = F.linear(x, torch.ones(5, 4, requires_grad=True)).grad_fn  # a product of rows, between two views
    names = [name_of(inner)]
    while names[-1] not in ("Mm", "Addmm", "Linear", "AccumulateGrad"):
        inner = before(inner)
        names.append(name_of(inner))
    assert set(names) <= {"UnsafeView", "View", "ReshapeAlias", "Mm", "Addmm", "Linear"}


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/logits.py")
def test_a_product_with_its_own_transpose_has_one_input_twice() -> None:
    """The node Mm of x @ x.T has the node of x and a T node of that same node as inputs. It holds the factors as
    `_saved_self` and `_saved_mat2`. LogSoftmax holds its result and axis."""
    x = torch.randn(4, 3, requires_grad=True) * 1.0
    product: Any = (x @ x.t()).grad_fn
    assert name_of(product) == "Mm"
    assert name_of(before(product, 1)) == "T"
    assert before(before(product, 1)) is before(product) is x.grad_fn
    assert product._saved_self.shape == (4, 3)
    assert product._saved_mat2.shape == (3, 4)
    result = F.log_softmax(x, -1)
    softmax: Any = result.grad_fn
    assert name_of(softmax) == "LogSoftmax"
    assert torch.equal(softmax._saved_result, result)
    assert int(softmax._saved_dim) % 2 == 1 or int(softmax._saved_dim) == 2**64 - 1


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
)
@pytest.mark.parametrize("op", [torch.mul, torch.div])
def test_products_and_quotients_hold_tensors_only(op: Any) -> None:
    """Mul and Div hold a second tensor, also one without dimensions, as `_saved_other`. A Python number is held as
    `_saved_other` with its Python type and has no input node; Mul by a number does not hold a tensor as `_saved_self`.
    """
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    node: Any = op(x, y).grad_fn
    assert name_of(node) == op.__name__.capitalize()
    assert torch.equal(node._saved_other, y)
    assert torch.equal(node._saved_self, x)
    one: Any = op(x, torch.tensor(2.0)).grad_fn
    assert one._saved_other.dim() == 0
    assert before(one, 1) is None
    number: Any = op(x, 2.0).grad_fn
    assert not isinstance(getattr(number, "_saved_self", None), Tensor)
    value = number._saved_other
    assert float(value) == 2.0
    assert not isinstance(value, Tensor) or value.dim() == 0
    assert [n for n, _ in number.next_functions if n is not None] == [before(number)]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
)
def test_nodes_of_ratios_and_differences() -> None:
    """Exp holds its result and has Sub as input. Clamp has the clamped value as input. Pow holds `_saved_exponent`. Sub
    of a constant has None as that input. Expand has the expanded value's node as input."""
    x, constant = torch.ones(3, 1, requires_grad=True) * 1.0, torch.ones(3)
    difference = x - constant
    ratio = (x - constant).exp()
    node: Any = ratio.grad_fn
    assert (name_of(node), name_of(before(node))) == ("Exp", "Sub")
    assert torch.equal(node._saved_result, ratio)
    assert [n is None for n, _ in difference.grad_fn.next_functions] == [False, True]  # type: ignore[union-attr]
    clamped: Any = ratio.clamp(0.8, 1.2).grad_fn
    assert name_of(clamped) == "Clamp"
    assert before(clamped) is node
    assert difference.pow(2).grad_fn._saved_exponent == 2  # type: ignore[union-attr]
    wide: Any = x.expand(3, 5).grad_fn
    assert (name_of(wide), before(wide)) == ("Expand", x.grad_fn)


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/logits.py")
def test_an_embedding_holds_its_indices() -> None:
    """The node Embedding holds the ids as `_saved_indices`, equal to the original tensor, in any shape."""
    ids = torch.tensor([[0, 2, 1]])
    node: Any = nn.Embedding(3, 4)(ids).grad_fn
    assert name_of(node) == "Embedding"
    assert torch.equal(node._saved_indices, ids)


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/inputs.py", "src/lockstep/strategies/engines/side_effects.py"
)
def test_tensors_of_vmap_and_grad_are_recognized() -> None:
    """Within torch.func's vmap and grad, is_functorch_wrapped_tensor is true for a tensor and get_unwrapped removes one
    level; outside, it is false."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    seen: list[tuple[bool, Any]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((is_functorch_wrapped_tensor(x), tuple(get_unwrapped(x).shape)))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [(True, (2, 3)), (True, (3,))]
    assert not is_functorch_wrapped_tensor(torch.ones(1))


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/lifetimes.py")
def test_foreach_operations_have_the_bits_of_single_ones() -> None:
    """torch._foreach_sub and _foreach_norm give the bits of the operation on each tensor."""
    ones = [torch.randn(n, 3) for n in (1, 7, 33)]
    others = [torch.randn(n, 3) for n in (1, 7, 33)]
    for a, b, c in zip(torch._foreach_sub(ones, others), ones, others, strict=True):
        assert torch.equal(a, b - c)
    for a, b in zip(torch._foreach_norm(ones), ones, strict=True):
        assert a.shape == ()
        assert torch.allclose(a, b.norm())


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/modes.py")
def test_random_operations_and_their_python_frames() -> None:
    """torch.nn.functional's dropout functions run bernoulli_ or native_dropout in the frame of a function with
    "dropout" in its name. Attention with dropout draws inside scaled_dot_product_attention, which has no Python frame.
    """
    import sys

    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[str, set[str]]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                frame, names = sys._getframe(), set()
                while frame is not None:
                    names.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
                    frame = frame.f_back  # type: ignore[assignment]
                seen.append((func._schema.name, names))
            return func(*args, **(kwargs or {}))

    with Mode():
        F.dropout(torch.ones(4))
        nn.Dropout1d()(torch.ones(2, 3, 4))
    assert [any(n.startswith("torch.nn.functional.") and "dropout" in n for n in names) for _, names in seen] == [
        True
    ] * 2
