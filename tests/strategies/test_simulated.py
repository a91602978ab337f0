"""Many ranks simulated in one process have the bits of one rank, for any number of ranks and any all-reduce."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from support.harness import digest
from support.marks import long
from support.own_modules import job
from support.simulated import SMALL, SimulatedJob, on_ranks, whole

pytestmark = pytest.mark.slow

STRATEGIES = {
    "allreduce": ("strategy.name=allreduce", "strategy.options.bucket_cap_mb=0.005"),
    "ddp": ("strategy.name=ddp", "strategy.options.bucket_cap_mb=0.005"),
    "fsdp2 by step": ("strategy.name=fsdp2", "strategy.options.gather=step"),
    "fsdp2": ("strategy.name=fsdp2", "strategy.options.gather=micro_batch"),
    "fsdp2 in copies": ("strategy.name=fsdp2", "strategy.options.replicate=2"),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(autouse=True)
def found_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)


def hashes(here: Path, micro_batches: int, ranks: int, a_host: int, *overrides: str) -> set[str]:
    """Return the digests of the ranks' final weights, with `a_host` ranks per host."""
    words = (f"micro_batches={micro_batches}", f"batch_size={micro_batches * 2 + 3}", *overrides)
    trained = SimulatedJob(job(here, SMALL, *words))
    parts, _ = on_ranks(trained.run, [f"host-{rank // a_host}" for rank in range(ranks)], trained)
    like = dict(trained.task.model().named_parameters())
    return {digest(weights) for weights in whole(parts, like)}


@cache
def alone(here: Path, micro_batches: int) -> set[str]:
    return hashes(here, micro_batches, 1, 1, "strategy.name=single")


@pytest.mark.parametrize("name", STRATEGIES)
def test_simulated_ranks_have_the_bits_of_one(name: str, here: Path) -> None:
    """Twelve ranks on hosts of five, with uneven shares."""
    assert hashes(here, 20, 12, 5, *STRATEGIES[name]) == alone(here, 20)


@pytest.mark.parametrize("name", ["allreduce", "fsdp2 by step"])
@pytest.mark.parametrize("exchange", ["flat", "hierarchical"])
def test_both_all_reduces_have_the_bits_of_one_process(name: str, exchange: str, here: Path) -> None:
    """Three ranks on one host, with either all-reduce."""
    assert hashes(here, 8, 3, 3, *STRATEGIES[name], f"strategy.all_reduce={exchange}") == alone(here, 8)


def test_the_control_an_ordinary_all_reduce_has_other_bits(here: Path) -> None:
    (other,) = hashes(here, 20, 12, 5, *STRATEGIES["allreduce"], "strategy.exact=false")
    assert {other} != alone(here, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ("allreduce", "fsdp2 by step") else long(n) for n in STRATEGIES])
def test_64_ranks_have_the_bits_of_one(name: str, here: Path) -> None:
    """64 ranks on eight hosts. Every CI run covers twelve ranks under every strategy, above."""
    assert hashes(here, 100, 64, 8, *STRATEGIES[name]) == alone(here, 100)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["allreduce", "ddp", "fsdp2 by step", "fsdp2"])
def test_1024_ranks_have_the_bits_of_one(name: str, here: Path) -> None:
    """`benchmarks/thousand.py` records more of it."""
    kept = tuple(word for word in STRATEGIES[name] if "bucket_cap_mb" not in word)
    assert hashes(here, 1024, 1024, 8, *kept) == alone(here, 1024)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("micro_batches", [1024, 4096])
@pytest.mark.parametrize("ranks", [96, 100, 1000])
def test_a_thousand_ranks_with_uneven_shares_have_the_bits_of_one(ranks: int, micro_batches: int, here: Path) -> None:
    assert hashes(here, micro_batches, ranks, 8, *STRATEGIES["fsdp2 by step"]) == alone(here, micro_batches)
