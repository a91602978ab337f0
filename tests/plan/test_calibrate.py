"""`lockstep bench --calibrate`: what ranks measure, what becomes of it, and a plan by it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.training.resolve import for_rank
from lockstep_plan import calibrate, devices, rates
from lockstep_plan.devices import Device, Link
from lockstep_plan.estimate import computed, estimate, travelling
from lockstep_plan.rates import Rates
from lockstep_plan.simulated import Product, Products
from support.command import LOCKSTEP, ended, start_anew, write
from support.harness import run_on, tiny
from support.marks import long
from support.messages import raises
from support.planned_memory import simulated

SIZES, MESSAGES = (2**12, 2**18), (2**10, 2**14, 2**16)  # bytes


def measured(processes: int, **changed: Any) -> Rates:
    """One round: a step of one process takes 1.5 s, and on two ranks at once 1.8."""
    told: dict[str, Any] = {"processes": processes, "threads": 1, "precision": "fp32", "memory_bytes": 8 * 10**9}
    told["at_once_s"] = {1: 1.5, 2: 1.8, 4: 3.3}[processes]
    if processes == 1:
        told |= {"products": [(1e6, 1e9), (1e8, 1e11)], "memory": [(1e3, 1e9), (1e6, 1e10)], "operation_s": 1e-6}
        told |= {"view_s": 1e-7, "micro_batches": 4}
        told["phases"] = {"forward": 0.5, "backward": 0.8, "optimizer": 0.18, "other": 0.02}
    else:
        told |= {"latency_s": 1e-4 * processes, "messages": [(1e4, 1e8), (1e6, 1e9)]}
    return Rates(**(told | changed))


def device(step_scale: float | dict[str, float] = 1.0, **changed: Any) -> Device:
    found = calibrate.shape_of([{n: measured(n) for n in (1, 2, 4)}], step_scale)
    return found.model_copy(update={"cores": 2} | changed)


def test_medians_over_rounds() -> None:
    rounds = [{1: measured(1, at_once_s=s), 2: measured(2, at_once_s=2 * s)} for s in (1.5, 1.6, 9.0)]
    found = calibrate.shape_of(rounds)
    assert found.crowding == pytest.approx({1: 1.6 / 1.5, 2: 3.2 / 1.5})
    assert found.flops["fp32"] == [(1e6, 1e9), (1e8, 1e11)]
    assert set(found.sources) >= set(devices.FIGURES)
    assert found.memory_bytes == 4e9  # of each of two


def test_the_predicted_step_of_one_process_matches_the_measurement() -> None:
    ops = [("forward", 10**8, 0, 100.0), ("backward", 0, 10**6, 50.0), ("optimizer", 0, 10**6, 5.0)]
    rounds = [{1: measured(1)}]
    found = calibrate.device_of(tiny(), rounds, {"single": [simulated(ops=ops)]})
    seconds = computed(Job.of(tiny(), 1), simulated(ops=ops, micro_batches=4), found)
    assert seconds == pytest.approx({"forward": 0.5, "backward": 0.8, "optimizer": 0.18, "other": 0.02})
    half = simulated(ops=[("overlapped", *ops[1][1:])], micro_batches=2)
    assert computed(Job.of(tiny(), 1), half, found) == pytest.approx({"overlapped": 0.8, "other": 0.01})


def test_overhead_of_an_engine_applies_to_its_strategy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks that slow each other down by 1.25 FSDP2 took 0.5 s more than its 4 micro-batches come to, and each
    rank of a pipeline 0.25: 0.1 and 0.05 s a micro-batch alone. A stage's phase is a mixture of forward and
    backward."""
    ops = [("forward", 0, 10**6, 50.0), ("backward", 0, 10**6, 80.0)]
    half = [("forward+backward", 0, 10**6, 65.0)]
    engines = {"fsdp2": 1.25 * 1.72, "pipeline": 1.25 * (0.67 + 0.2)}
    feed: Any = Uneven()
    monkeypatch.setattr("lockstep_plan.planner.feed_of", lambda _: feed)
    monkeypatch.setattr("lockstep_plan.estimate.levels", lambda *_: (1.0, dict.fromkeys(range(4), 1.0)))
    steps = dict.fromkeys(engines, 0.0)
    rounds = [{1: measured(1), 2: measured(2, engines=engines, busy_s=1.25 * 1.32, steps=steps)}]
    every = {name: [simulated(ops=each, micro_batches=4)] for name, each in (("single", ops), ("fsdp2", ops))}
    every["pipeline"] = [simulated(ops=half, micro_batches=4)] * 2
    found = calibrate.device_of(tiny(), rounds, every)
    assert found.engine_s == pytest.approx({"fsdp2": 0.1, "pipeline": 0.05})
    seconds = {}
    for name, options in (("ddp", {}), ("fsdp2", {"gather": "step"}), ("fsdp2", {"gather": "micro_batch"})):
        run = tiny(strategy={"name": name, "options": options})
        seconds[name, *options.values()] = computed(Job.of(run, 1), every["fsdp2"][0], found)["other"]
    assert seconds["fsdp2", "step"] == seconds["ddp",] == pytest.approx(0.02)
    assert seconds["fsdp2", "micro_batch"] == pytest.approx(0.42)
    staged = computed(Job.of(tiny(strategy={"name": "pipeline", "options": {}}), 2), every["pipeline"][0], found)
    assert sum(staged.values()) == pytest.approx(1.2 * (0.67 + 0.2))


def test_remaining_time_is_attributed_to_waiting_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of two ranks of `ddp` is foretold as it was measured; half the messages are waited for half as long, and
    those of a strategy that took less than its plan not at all."""
    feed: Any = Uneven()
    monkeypatch.setattr("lockstep_plan.planner.feed_of", lambda _: feed)
    monkeypatch.setattr("lockstep_plan.estimate.levels", lambda *_: (1.0, dict.fromkeys(range(4), 1.0)))
    ops = [("forward", 0, 10**6, 50.0), ("backward", 0, 10**6, 80.0)]
    of = {
        name: [simulated(ops=ops, sent=[("reduction", "allreduce", (0, 1), 4 * 10**6, None, count)], micro_batches=2)]
        for name, count in (("ddp", 6.0), ("half", 3.0))
    }
    rounds = [
        {1: measured(1), 2: measured(2, busy_s=1.32, steps={"ddp": s, "allreduce": 0.1})} for s in (2.4, 2.5, 2.6)
    ]
    single = [simulated(ops=ops, micro_batches=4)]
    found = calibrate.device_of(tiny(), rounds, {"single": single, "ddp": of["ddp"], "allreduce": of["ddp"]})
    ddp, allreduce = (tiny(strategy={"name": name, "options": {}}) for name in ("ddp", "allreduce"))
    whole = estimate(Job.of(ddp, 2), of["ddp"], found, feed)
    assert whole.step_s == pytest.approx(2.5)
    assert found.wait_s == pytest.approx({"ddp": whole.seconds["waiting"] / 6, "allreduce": 0})
    assert estimate(Job.of(ddp, 2), of["half"], found, feed).seconds["waiting"] == pytest.approx(
        whole.seconds["waiting"] / 2
    )
    assert estimate(Job.of(allreduce, 2), of["ddp"], found, feed).seconds["waiting"] == 0


def test_overlap_is_fitted_as_a_mixture_with_the_rest_of_the_step() -> None:
    ops = [("forward", 0, 10**6, 25.0), ("backward", 0, 10**6, 80.0)]  # that took 0.5 and 0.8 s
    found = calibrate.device_of(tiny(), [{1: measured(1)}], {"single": [simulated(ops=ops)]})
    for first, seconds in (("forward+backward", 10 * 1.3 / 105), ("backward", 10 * 0.8 / 80)):
        of = simulated(ops=[(first, 0, 10**6, 10.0), ("overlapped", 0, 10**6, 10.0)])
        assert computed(Job.of(tiny(), 1), of, found)["overlapped"] == pytest.approx(seconds)


def test_matrix_products_of_all_sizes_are_measured() -> None:
    def picked(*sizes: int, count: int = 10) -> list[int]:
        return [each.flops for each in rates.spread([Product(flops, (None, (), {}), count) for flops in sizes])]

    assert picked(10, 11, 1000, 1010, 10**6) == [10**6, 1010, 11]
    assert picked(0) == picked(5, count=0) == []
    assert picked(*(2**n for n in range(40))) == [2**n for n in range(39, 39 - rates.PRODUCTS, -1)]


def test_matrix_products_of_a_step_are_measured_again() -> None:
    layer, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    with Products() as seen:
        for _ in range(2):
            layer(x).sum().backward()
    forward = next(each for name, each in seen.products.items() if name.startswith("aten.addmm"))
    assert (forward.flops, forward.count, forward.work) == (2 * 3 * 8 * 4, 2, 2 * 2 * 3 * 8 * 4)
    assert forward.again()().shape == (3, 4)
    assert sum(each.work for each in seen.products.values()) == 2 * 2 * forward.flops  # no gradient of the input


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    calibrate.write(device({"forward": 1.5}), tmp_path / "here.yaml")
    found = devices.load(str(tmp_path / "here.yaml"))
    assert found.scale("forward") == 1.5
    assert (found.scale("optimizer"), found.slower(4), found.inside(4).latency_s) == (1.0, 2.2, 4e-4)
    alone = calibrate.shape_of([{1: measured(1)}])
    calibrate.write(alone, tmp_path / "alone.yaml")
    assert devices.load(str(tmp_path / "alone.yaml")).links.shared == {}
    with raises("LS8310", "crowding", error=ValueError):
        Device.model_validate(device().model_dump() | {"crowding": {1: 0.0}})


def test_a_link_has_the_rate_of_its_messages() -> None:
    link = Link(bytes_per_s=[(1e4, 1e8), (1e6, 1e9)], latency_s=1e-3)
    assert link.seconds(3, 3e6) == pytest.approx(3e-3 + 3e6 / 1e9)
    assert link.seconds(3, 3e4) == pytest.approx(3e-3 + 3e4 / 1e8)
    assert link.seconds(0, 0) == 0


def test_link_rates_of_the_nearest_number_of_ranks_are_used() -> None:
    found = device()
    assert [found.inside(n).latency_s for n in (1, 2, 3, 4, 64)] == [2e-4, 2e-4, 4e-4, 4e-4, 4e-4]
    of = simulated(sent=[("reduction", "allgather_base", (0, 1, 2, 3), 4 * 10**6, None, 1.0)])
    (wire,), added = travelling(of, {}, found, 4)
    assert (wire.messages, wire.bytes, added) == (3, 3e6, pytest.approx(3 * 4e-4 + 3e6 / 1e9))


class Uneven:
    """The part of a feed that `levels` uses: two micro-batches, one with three times the tokens of the other."""

    total, pads = 1, False


def test_ranks_that_share_cores_do_not_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep_plan.estimate.levels", lambda *_: (0.8, dict.fromkeys(range(4), 1.0)))
    ops = [("forward", 10**8, 0, 100.0)]
    feed: Any = Uneven()
    shared = estimate(Job.of(tiny(strategy="allreduce"), 4), [simulated(ops=ops)], device(), feed)
    apart = estimate(Job.of(tiny(strategy="allreduce"), 4), [simulated(ops=ops)], device(cores=8), feed)
    assert shared.seconds["waiting"] == 0
    assert apart.seconds["waiting"] == pytest.approx(0.2 * 2.2 * 0.1, rel=0.01)  # 1e10 FLOP at 1e11 a second
    assert shared.step_s == pytest.approx(0.8 * apart.step_s)


def test_a_stage_that_waits_leaves_its_core_to_others() -> None:
    run = tiny(strategy={"name": "pipeline"}, micro_batches=8)
    ops = [("forward+backward", 10**8, 0, 100.0)]
    work, feed = 0.1, Uneven()
    found: Any = feed
    apart = estimate(Job.of(run, 4), [simulated(ops=ops)], device(cores=None, crowding={}), found)
    assert apart.step_s == pytest.approx(work * (1 + 3 / 8), rel=0.01)
    shared = estimate(Job.of(run, 4), [simulated(ops=ops)], device(crowding={1: 1.0, 2: 1.0, 4: 2.0}), found)
    assert shared.step_s == pytest.approx(2 * work, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "9"], "9 processes cannot share 4 micro-batches"),
        (["--processes", "0"], "--processes: invalid value 0"),
        (["--strategies", "ddp"], "--strategies: not supported with --calibrate"),
        (["--weak"], "--weak"),
        (["model.compile=true"], "model.compile"),
    ],
)
def test_jobs_that_cannot_be_calibrated_are_refused(
    words: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "run.yaml", "--calibrate", *words]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in run_file.parent.iterdir()] == ["run.yaml"]


def job(world: World, run: Run) -> int:
    rates.LEAST_S, rates.SIZES, rates.MESSAGES = 1e-4, SIZES, MESSAGES  # what is asked here is not how fast it is
    return rates.measure(for_rank(run, world), world, "1")


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_ranks_measure_themselves_and_each_other(tmp_path: Path) -> None:
    found = {}
    for ranks, name in ((1, "single"), (2, "allreduce")):
        run = tiny(f"strategy.name={name}", f"output={tmp_path / str(ranks)}")
        run.folder.mkdir()
        assert run_on(ranks, job, run, joined=False, timeout_s=400) == [0] * ranks
        found[ranks] = rates.read(run.folder)
    alone, two = found[1], found[2]
    assert alone is not None
    assert two is not None
    assert (alone.processes, two.processes, alone.threads) == (1, 2, 1)
    assert {"forward", "backward", "optimizer"} <= set(alone.phases)
    widths = {flops for flops, _ in alone.products}
    assert all(flops % 2 == 0 for flops in widths)
    assert len(widths) > 2
    assert alone.micro_batches == 8
    assert all(rate > 0 for _, rate in [*alone.products, *alone.memory, *two.messages])
    assert [size for size, _ in alone.memory] == list(SIZES)
    assert [size for size, _ in two.messages] == [size / 2 for size in MESSAGES[1:]]
    assert two.latency_s > 0
    assert two.at_once_s > 0
    assert not two.phases  # one process alone says what a step is made of
    assert two.engines.keys() == rates.ENGINES.keys()
    assert two.steps.keys() == rates.STRATEGIES.keys()
    assert min(*two.engines.values(), *two.steps.values(), two.busy_s) > 0
    made = calibrate.shape_of([{1: alone, 2: two}])
    assert made.links.shared.keys() == {2}


@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [long(2)])
def test_a_plan_with_measured_rates(processes: int, tmp_path: Path, cache: Path) -> None:
    write(tmp_path)
    words = ["bench", "run.yaml", "--calibrate", "--processes", f"{processes}", "--steps", "2", "--rounds", "1"]
    status, out, err = ended(start_anew([*LOCKSTEP, *words, "--out", "here"], tmp_path, cache), 900)
    assert status == 0, err
    assert "here/device.yaml" in out
    told = yaml.safe_load((tmp_path / "here" / "device.yaml").read_text())
    assert set(told["step_scale"]) >= {"forward", "backward", "optimizer"}
    words = ["plan", "run.yaml", "--simulate", "--processes", f"{processes}", "--device", "here/device.yaml"]
    status, out, err = ended(start_anew([*LOCKSTEP, *words, "strategy.name=ddp"], tmp_path, cache), 900)
    assert status == 0, err
    assert "for 2 processes" in out
    assert json.loads((tmp_path / "here" / "jobs" / "2" / "rates.json").read_text())["processes"] == 2
