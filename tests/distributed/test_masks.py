"""Dropout masks that are drawn wide: as often ones as asked for, and a pure function of torch's generator."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.distributed import randomness
from lockstep.distributed.randomness import seed_everything

randomness.draw_wide()
QUERY = torch.randn(1, 2, 64, 8)


def drawn(make: Callable[[], Tensor], *place: int) -> Tensor:
    seed_everything(0, *place)
    return make()


MAKERS = {
    "dropout": lambda: F.dropout(torch.ones(1001), 0.1),
    "a module": lambda: torch.nn.Dropout(0.5)(torch.ones(7, 3)),
    "attention": lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY, dropout_p=0.3),
    "bernoulli_": lambda: torch.empty(5, 5, 5).bernoulli_(0.2),
    "bf16": lambda: torch.empty(333, dtype=torch.bfloat16).bernoulli_(0.2),
    "bool, transposed": lambda: torch.empty(9, 4, dtype=torch.bool).t().bernoulli_(0.4),
}


@pytest.mark.parametrize("name", MAKERS)
def test_masks_depend_only_on_the_position_in_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, again = (drawn(MAKERS[name], *place) for place in ((3, 1), (3, 2), (3, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_torch_calls_the_replaced_kernel() -> None:
    """Within attention, too: torch's own draws leave its generator in another state."""
    seed_everything(1)
    int(torch.randint(2**63 - 1, ()))
    after_one_number = torch.get_rng_state()
    for make in MAKERS.values():
        seed_everything(1)
        make()
        assert torch.equal(torch.get_rng_state(), after_one_number)


@pytest.mark.parametrize("p", [0.0, 1e-4, 0.1, 0.5, 0.9, 1 - 2**-40, 1.0])
def test_the_share_of_kept_elements(p: float) -> None:
    """Within five standard deviations; of neighbours too, and of numbers a word apart."""
    torch.manual_seed(0)
    count = 4_000_000
    found = torch.empty(count, dtype=torch.float64).bernoulli_(p)
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    assert abs(found.mean() - p) <= 5 * (p * (1 - p) / count) ** 0.5 + 1e-9
    for apart in (1, 2):
        both = (found[apart:] * found[:-apart]).mean()
        assert abs(both - p * p) <= 10 * (p * (1 - p) / count) ** 0.5 + 1e-9


def test_a_separate_generator_draws_the_same_numbers() -> None:
    one, other = (torch.empty(100).bernoulli_(0.5, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, other)


def test_gradients_are_masked_as_values_are() -> None:
    inputs = torch.ones(50, 3, requires_grad=True)
    out = F.dropout(inputs, 0.25)
    out.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, out.detach())
    assert torch.allclose(out.detach().unique(), torch.tensor([0.0, 1 / 0.75]))


def test_masks_of_empty_tensors_and_invalid_probabilities() -> None:
    assert torch.empty(0, 3).bernoulli_(0.5).shape == (0, 3)
    with pytest.raises(RuntimeError, match=r"expects p to be in \[0, 1\]"):
        torch.empty(3).bernoulli_(1.5)


def test_random_numbers_match_splitmix64() -> None:
    """The first three of the published generator with the seed 0; chained ones element by element as by themselves."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    step = 0x9E3779B97F4A7C15  # of the generator's state, of which `mixed` makes two
    assert [int(randomness.mixed((number - 2) * step)) for number in (1, 2, 3)] == published
    rows, places = np.array([[0], [7]]), np.arange(4)
    found = randomness.mixed(3, -1, rows, places)
    assert found[1, 2] == randomness.mixed(3, 2**64 - 1, 7, 2)
    assert len(set(found.ravel().tolist())) == 8
