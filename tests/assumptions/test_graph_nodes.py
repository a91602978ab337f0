"""What lockstep-trace assumes about the nodes of autograd's graphs: their names, and what they hold."""

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


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/logits.py")
def test_nodes_of_moves_hold_their_axes_and_sizes() -> None:
    """View holds the size before as `_saved_self_sym_sizes`, Permute `_saved_dims`, Transpose `_saved_dim0` and
    `_saved_dim1`, negative ones possibly as unsigned numbers; T holds nothing; Cat has a node for each part."""
    x = torch.ones(2, 3, 4, requires_grad=True)

    def signed(number: int) -> int:
        return number - (1 << 64 if number >= 1 << 63 else 0)

    view: Any = x.view(6, 4).grad_fn
    assert (name_of(view), list(view._saved_self_sym_sizes)) == ("View", [2, 3, 4])
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
    """The node Mm of x @ x.T has the node of x and a node T over that very node; it holds the factors as `_saved_self`
    and `_saved_mat2`. LogSoftmax holds its result and axis."""
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
    "packages/lockstep-trace/src/lockstep_trace/tracer/all_pairs.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
)
@pytest.mark.parametrize("op", [torch.mul, torch.div])
def test_products_and_quotients_hold_tensors_only(op: Any) -> None:
    """Mul and Div hold a second tensor as `_saved_other`, one without dimensions too. A number is held as
    `_saved_other` of its Python type, and its node is none; Mul by a number holds no tensor as `_saved_self`."""
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
    "packages/lockstep-trace/src/lockstep_trace/tracer/all_pairs.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
)
def test_nodes_of_ratios_and_differences() -> None:
    """Exp holds its result and stands over Sub; Clamp has the clamped value before it; Pow holds `_saved_exponent`;
    Sub of a constant has None in its place; Expand has the node of what it repeats."""
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


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/answers.py")
def test_an_embedding_holds_its_indices() -> None:
    """The node Embedding holds the ids as `_saved_indices`, the very tensor's numbers, of any shape."""
    ids = torch.tensor([[0, 2, 1]])
    node: Any = nn.Embedding(3, 4)(ids).grad_fn
    assert name_of(node) == "Embedding"
    assert torch.equal(node._saved_indices, ids)


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/inputs.py", "src/lockstep/strategies/engines/side_effects.py"
)
def test_a_tensor_within_vmap_or_grad_is_known_as_one() -> None:
    """Within torch.func's vmap and grad a tensor is_functorch_wrapped_tensor, and get_unwrapped takes one level off;
    outside it is not."""
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

    seen: list[tuple[bool, Any]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((is_functorch_wrapped_tensor(x), tuple(get_unwrapped(x).shape)))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [(True, (2, 3)), (True, (3,))]
    assert not is_functorch_wrapped_tensor(torch.ones(1))


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/averages.py")
def test_foreach_differences_are_those_of_each() -> None:
    """torch._foreach_sub and _foreach_norm give the bits of one tensor after the other."""
    ones = [torch.randn(n, 3) for n in (1, 7, 33)]
    others = [torch.randn(n, 3) for n in (1, 7, 33)]
    for a, b, c in zip(torch._foreach_sub(ones, others), ones, others, strict=True):
        assert torch.equal(a, b - c)
    for a, b in zip(torch._foreach_norm(ones), ones, strict=True):
        assert a.shape == ()
        assert torch.allclose(a, b.norm())


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/evaluation_noise.py")
def test_operations_that_draw_have_names_and_frames() -> None:
    """Dropout of torch.nn.functional runs bernoulli_ or native_dropout in the frame of a function whose name has
    dropout; attention with dropout draws below scaled_dot_product_attention, which has no frame of its own."""
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
