"""A plan's rates, messages, waiting time, cost and refusals, from simulated ranks; no process is started."""

import re
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.data.job import Job
from lockstep.strategies.exact.reduce_schedule import links
from lockstep_plan import devices, planner
from lockstep_plan import fake_world as ranks_of
from lockstep_plan.devices import Device, at
from lockstep_plan.estimate import (
    Estimate,
    Wire,
    beside_slowest,
    bubbles,
    on_the_way,
    parts,
    power_of_two,
    travelling,
    turns,
)
from lockstep_plan.planner import Plan, candidates, looked_at, ranked
from support.harness import tiny
from support.planned_memory import simulated


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_every_figure_of_a_device_has_a_source(name: str) -> None:
    device = devices.load(name)
    assert set(device.sources) >= set(devices.FIGURES) | {"reaches"}
    assert device.ranks_per_node == 8


def test_an_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    device = devices.load("h100")
    flops = 10**12
    assert device.seconds("bf16", flops, 1000) == pytest.approx(5e-6 + flops / (989e12 * 0.4))
    assert device.seconds("bf16", 1000, 10**10) == pytest.approx(5e-6 + 10**10 / 3.35e12)
    assert device.seconds("bf16", 0, 0) == 0  # a view


def test_rates_are_interpolated_logarithmically() -> None:
    rate = [(1e3, 1e9), (1e5, 1e11)]
    assert at(rate, 1e4) == pytest.approx(1e10)
    assert (at(rate, 1), at(rate, 1e9), at(7.0, 3)) == (1e9, 1e11, 7.0)


def test_messages_of_collectives_by_level() -> None:
    group = tuple(range(16))
    assert parts("alltoall_base", group, 1600, None, 0, 8) == [(True, 7, 700), (False, 8, 800)]
    assert parts("allgather_base", group, 1600, None, 0, 8) == [(False, 15, 1500)]
    assert parts("allgather_base", group[:8], 1600, None, 0, 8) == [(True, 7, 1400)]
    assert parts("allreduce", group, 1600, None, 0, 8) == [(False, 30, 3000)]
    assert parts("send", (0, 8), 100, 8, 0, 8) == [(False, 1, 100)]


def test_messages_travel_while_a_gpu_computes() -> None:
    device = devices.load("h100")
    of = simulated(sent=[("backward", "allgather_base", tuple(range(16)), 16 * 10**9, None, 1.0)])
    seconds = 15 * 10e-6 + 15e9 / 50e9
    for computing, added in ((0.1, seconds - 0.1), (1.0, 0.0)):
        wire, found = travelling(of, {"backward": computing}, device, 16)
        assert found == pytest.approx(added)
        assert (wire[0].bytes, wire[0].inside) == (15e9, False)
    alone = device.model_copy(update={"overlaps": False})
    assert travelling(of, {"backward": 1.0}, alone, 16)[1] == pytest.approx(seconds)


def test_ranks_wait_for_the_slowest_in_a_step_or_in_each_turn() -> None:
    """Four micro-batches of falling length on two ranks: a rank's share is a half, or every other one."""
    work = [8.0, 6.0, 4.0, 2.0]
    assert beside_slowest(work, None, 2) == [1.0, 6 / 14]
    run = tiny(strategy={"name": "fsdp2", "options": {"gather": "micro_batch"}}, micro_batches=4)
    assert turns(run, 2) == [[range(1), range(1, 2)], [range(2, 3), range(3, 4)]]
    assert beside_slowest(work, turns(run, 2), 2) == [1.0, 8 / 12]
    assert [len(own) for own in turns(run, 3)[1]] == [1, 0, 0]
    copies = tiny(strategy={"name": "fsdp2", "options": {"replicate": 2}}, micro_batches=8)
    assert [[own.start for own in turn] for turn in turns(copies, 4)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_stages_wait_for_the_first_and_the_last_micro_batch() -> None:
    run = tiny(strategy={"name": "pipeline"}, micro_batches=8)
    assert bubbles(Job.of(run, 4)) == 3 / 8
    interleaved = {"schedule": "interleaved", "stages_per_rank": 2}
    assert bubbles(Job.of(tiny(strategy={"name": "pipeline", "options": interleaved}, micro_batches=8), 4)) == 3 / 16
    assert bubbles(Job.of(tiny(), 4)) == 0


def test_stages_wait_for_messages_in_transit() -> None:
    """Messages of 2 ms: 4 stages and 8 micro-batches, of which 4 are on their way at once, each down and up again."""
    wire = [Wire("send", True, 16, 16e6, 0.032), Wire("allreduce", True, 2, 1e3, 1.0)]
    for options, ranks, seconds in (({}, 4, 0.024), ({"schedule": "gpipe"}, 4, 0.012), ({"stages": 2}, 4, 0.008)):
        run = tiny(strategy={"name": "pipeline", "options": options}, micro_batches=8)
        assert on_the_way(Job.of(run, ranks), wire) == pytest.approx(seconds)
    assert on_the_way(Job.of(tiny(), 4), wire) == 0


def test_ranks_with_different_work() -> None:
    assert looked_at(Job.of(tiny(micro_batches=8), 4)) == [0]
    assert looked_at(Job.of(tiny(micro_batches=8), 3)) == [0, 2]
    assert looked_at(Job.of(tiny(strategy={"name": "pipeline"}), 4)) == [0, 1, 3]
    assert looked_at(Job.of(tiny(strategy={"name": "pipeline", "options": {"stages": 2}}), 4)) == [0, 2]


def test_simulated_ranks_are_on_the_machines_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which sums travel in stages: here between two machines of two ranks each."""
    monkeypatch.setattr(ranks_of.simulated, "join", lambda rank, ranks: None)  # no process group here
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    run = tiny()
    found = {each: links(run.strategy, ranks_of.FakeWorld(run).on_machines(each)) for each in (2, 4)}
    assert found[2].hosts == ("machine-0", "machine-0", "machine-1", "machine-1")
    assert [found[each].tree(4) for each in (2, 4)] == [True, False]


def test_mfu_is_the_share_of_the_stated_rate_of_all_devices() -> None:
    """A step of 0.5 s with 1,000 tokens of 6e9 operations each, on two devices."""
    step = Estimate({"forward": 0.5, "messages": 0.0, "waiting": 0.0}, [], 0, True, simulated())
    for keys, rate in (
        ({"precision": "bf16"}, 989e12),
        ({}, 67e12),
        ({"model": {"source": "m", "dtype": "bfloat16"}}, 989e12),
    ):
        planned = Plan(tiny(**keys), 2, step, tokens=1000, operations=6e9)
        assert planned.mfu(devices.load("h100")) == pytest.approx(1000 * 6e9 / 0.5 / (2 * rate))
        assert planned.mfu(devices.load("h100").model_copy(update={"kind": "cpu"})) == 0


def test_candidates_are_powers_of_two_that_a_step_has_examples_for() -> None:
    run = tiny(batch_size=22)
    assert {each.micro_batches for each in candidates(run, 5)} == {8, 16}
    assert {each.strategy.name for each in candidates(run, 5)} == {"ddp", "fsdp2", "pipeline"}
    assert {each.strategy.name for each in candidates(run, 1)} == {"single", "fsdp2"}
    assert candidates(run, 23) == []
    assert [power_of_two(n) for n in (1, 2, 3, 96, 1000, 1024)] == [1, 2, 4, 128, 1024, 1024]


def test_candidates_that_fit_come_first_then_by_speed() -> None:
    def made(micro_batches: int, seconds: float, fits: bool) -> Plan:
        found = Estimate({"forward": seconds, "messages": 0, "waiting": 0}, [], 1, fits, simulated())
        return Plan(tiny(micro_batches=micro_batches), 4, found, steps=3600)

    quick, slow, small, large = made(8, 1.0, True), made(8, 2.0, True), made(8, 0.1, False), made(4, 1.001, True)
    refused = Plan(tiny(), 4, None, "why not")
    assert ranked([refused, small, slow, large, quick]) == [quick, large, slow, small, refused]
    assert quick.device_hours == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--simulate", "--processes", "6"], "set micro_batches=8 or more, or 16 to allow"),
        (["--simulate", "--device", "h900"], "unknown device 'h900'; expected a100, h100 or a YAML file of rates"),
        (["--simulate", "--processes", "0"], "--processes: invalid value 0"),
        (["--simulate", "--price", "-1"], "--price: invalid value -1"),
        (["--simulate", "--out", "page"], "--out: invalid file page"),
        (["--processes", "4"], "--processes: has an effect only with --simulate"),
        (["--suggest", "--processes", "64"], "64 micro-batches or more, but a step has batch_size=22"),
        (["--simulate", "--processes", "2", "strategy=single"], "single supports one process only"),
        (["--simulate", "model.compile=true", "strategy=ddp", "--processes", "2"], "cannot be simulated"),
    ],
)
def test_impossible_plans_are_refused(
    words: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "run.yaml", *words]) == 2
    assert said in capsys.readouterr().err


def test_errors_in_a_device_file_are_named(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = yaml.safe_load((devices.FOLDER / "h100.yaml").read_text())
    assert Device.model_validate(good).name == "NVIDIA H100 SXM, 80 GB"
    for changed, said in (
        ({"flops": {"fp8": 1.0}}, "flops: invalid value 'fp8'; expected"),
        ({"memory_bytes": -1}, "memory_bytes: invalid value -1; expected"),
        ({"sources": {}}, "missing memory_bytes"),
        ({"flops": {"bf16": 1.0}}, "has no flops for precision=fp32"),
    ):
        (run_file.parent / "mine.yaml").write_text(yaml.safe_dump(good | changed))
        assert main(["plan", "run.yaml", "--simulate", "--processes", "2", "--device", "mine.yaml"]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_on_the_terminal_and_as_a_page(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = [("forward", 10**15, 10**6, 2.0), ("backward", 2 * 10**15, 10**6, 2.0)]
    sent = [("backward", "alltoall_base", (0, 1), 10**9, None, 1.0)]
    peak = {"weights": 10**9, "activations": 10**9}
    told = simulated(ops=ops, sent=sent, peak=2 * 10**9, kinds=peak)
    monkeypatch.setattr(planner, "simulate", lambda *_: [told])
    words = ["plan", "run.yaml", "--simulate", "--processes", "2", "--price", "2", "precision=bf16"]
    assert main([*words, "--out", "plan.html"]) == 0
    said = capsys.readouterr().out
    assert "2.0 GB of 80.0 GB in backward: weights 1.0 GB, activations 1.0 GB" in said
    assert "all to all, inside a machine: 1 message, 500.0 MB" in said
    assert "device-hours, " in said
    assert re.search(r"^rate +[\d,]+ tokens/s, [\de.-]+% of the device's stated rate \(MFU\)$", said, re.M)
    assert "weights 1.0 GB" in (run_file.parent / "plan.html").read_text()
    assert (
        main(["plan", "run.yaml", "--simulate", "--processes", "2", "4", "precision=bf16", "--out", "grown.html"]) == 0
    )
    grown = (run_file.parent / "grown.html").read_text()
    assert all(f"<td>{count}</td>" in grown for count in (2, 4))
    assert "sent per rank and step, GB" in grown
    monkeypatch.setattr(planner, "simulate", lambda *_: [simulated(ops=ops, peak=79 * 10**9)])
    assert main(words) == 1
    assert "NO: out of memory" in capsys.readouterr().out
