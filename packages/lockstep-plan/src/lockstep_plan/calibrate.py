"""`lockstep bench --calibrate`: measure this machine, and write a device file for `lockstep plan --simulate`.

In: a run, and numbers of processes. Out: a YAML file with rates by size, and the slowdown of ranks that share the
machine. Each job runs in its own processes, through the run's launcher (`rates.py`).

One process under `single` yields the rates of the run's own model; all processes together yield message rates and the
slowdown; two processes under each of `STRATEGIES` yield its compute time beyond the operations and its waiting time
beyond the messages. Plans extrapolate to other numbers of processes and micro-batches.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lockstep.config.run import Run, RunError, write_run_yaml
from lockstep.data.job import Job
from lockstep.distributed.hardware import available_cores, processor
from lockstep.lab.bench import resolved
from lockstep.lab.subprocess_job import Child
from lockstep.launchers import start
from lockstep_plan import planner
from lockstep_plan.devices import Device
from lockstep_plan.estimate import computed, estimate
from lockstep_plan.fake_world import Simulated
from lockstep_plan.rates import ENGINES, NOT_THE_ENGINES, STRATEGIES, STRATEGIES_ON, Rates, read
from lockstep_trace.coded import quantity

MEASURE = "lockstep_plan.rates.measure"  # what every rank runs
FASTEST = 1e15  # bytes/s of the links if only one process was measured

Say = Callable[[str], None]


def calibrate(run: Run, processes: Sequence[int], steps: int, rounds: int, folder: Path, say: Say) -> Device:
    """Measure `rounds` rounds, write `FOLDER/device.yaml` and return the device. Errors: `RunError` before any process
    starts if the run cannot be measured; later if a job fails."""
    jobs = jobs_of(run, processes, folder)
    rates_of_rounds = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        rates_of_rounds.append(measured(jobs, steps, say))
    device = device_of(jobs[1], rates_of_rounds, simulated(jobs, rates_of_rounds, say))
    write(device, folder / "device.yaml")
    return device


def jobs_of(run: Run, processes: Sequence[int], folder: Path) -> dict[int, Run]:
    """Return the jobs to measure: number of processes (1 and each requested number) -> run. Errors: `RunError`."""
    if run.model.compiled or run.model.quantization is not None:
        key = "model.compile" if run.model.compiled else "model.quantization"
        raise RunError("LS8040", f"{key}: cannot be simulated or planned; calibrate without it")
    jobs = {count: job_of(run, count, folder) for count in sorted({1, *processes})}
    for job in jobs.values():
        resolved(job)
    return jobs


def measured(jobs: Mapping[int, Run], steps: int, say: Say) -> dict[int, Rates]:
    """Run all jobs once and return number of processes -> rates. Errors: `RunError` if a job fails."""
    rates = {}
    for count, job in jobs.items():
        rates[count] = one(job, steps)
        say(f"{quantity(count, 'process')} at once: {rates[count].at_once_s:.3g} s per single-process step")
    return rates


def simulated(
    jobs: Mapping[int, Run], rates_of_rounds: Sequence[Mapping[int, Rates]], say: Say
) -> dict[str, list[Simulated]]:
    """Simulate a step of `single` and of each measured strategy: name -> one `Simulated` per rank. Errors:
    `RunError`."""
    device = shape_of(rates_of_rounds)
    of = {"single": planner.simulate(Job.of(jobs[1], 1), device, say)}
    for name, way in STRATEGIES.items() if STRATEGIES_ON in jobs else ():
        if name in rates_of_rounds[0][STRATEGIES_ON].steps:
            of[name] = planner.simulate(
                Job.of(jobs[STRATEGIES_ON].with_keys("strategy", **way), STRATEGIES_ON), device, say
            )
    return of


def job_of(run: Run, count: int, folder: Path) -> Run:
    """Return a copy of the run with `count` processes and its own output folder. Errors: `RunError`."""
    if run.launch.device == "cuda":
        raise RunError(
            "LS8041",
            "launch.device: --calibrate measures processors; for a GPU write a device file: how-to/plan on the site",
        )
    if count > run.micro_batches:
        raise RunError(
            "LS8042",
            f"--processes: {count} processes cannot share {run.micro_batches} micro-batches; give "
            f"{run.micro_batches} at most",
        )
    strategy: dict[str, Any] = {"name": "single" if count == 1 else "allreduce", "options": {}}
    sections: Mapping[str, Mapping[str, Any]] = {"strategy": strategy, "launch": {"processes": count, "device": "cpu"}}
    changed = {name: getattr(run, name).model_copy(update=values) for name, values in sections.items()}
    return run.model_copy(update={**changed, "output": str(folder / "jobs" / f"{count}")})


def one(run: Run, steps: int) -> Rates:
    """Run one job of one round and return its rates. Errors: `RunError` with the job's message."""
    shutil.rmtree(run.folder, ignore_errors=True)
    write_run_yaml(run)
    child = Child("lockstep_plan.calibrate.job", [str(run.folder / "run.yaml"), str(steps)], run.folder, "job")
    try:
        child.wait()
    except BaseException:  # Ctrl-C
        child.kill()
        raise
    rates = read(run.folder)
    if child.status != 0 or rates is None:
        raise RunError("LS8043", f"--calibrate: {quantity(run.launch.processes, 'process')}: {child.reason()}")
    check_finite(asdict(rates))
    return rates


def job(words: list[str]) -> int:
    """Child process: start the ranks through the run's launcher. Returns their exit status."""
    from lockstep.config.run import load

    run = load(words[0], [])
    launcher = start.launcher_of(run.launch)
    return launcher.start(launcher.plan(run), (MEASURE, words[1]))


# -- device file -------------------------------------------------------------------------------------------------------


def shape_of(
    rates_of_rounds: Sequence[Mapping[int, Rates]], scale: float | dict[str, float] = 1.0, besides: float = 0.0
) -> Device:
    """Return the device with medians over rounds. `scale`: time of a step relative to the sum of its operations;
    `besides`: seconds per micro-batch outside of all phases."""
    alone, most = [each[1] for each in rates_of_rounds], max(rates_of_rounds[0])
    shared = {n: link_of([each[n] for each in rates_of_rounds]) for n in sorted(rates_of_rounds[0]) if n > 1}
    nothing = {"bytes_per_s": FASTEST, "latency_s": 0.0}
    inside = shared[most] if shared else nothing
    begun = median(sum(each.phases.values()) for each in alone)
    crowding = {n: median(each[n].at_once_s for each in rates_of_rounds) / begun for n in sorted(rates_of_rounds[0])}
    when, cores = time.strftime("%Y-%m-%d"), available_cores()
    what = f"measured on {when}, {quantity(len(rates_of_rounds), 'round')}, {quantity(alone[0].threads, 'thread')}"
    not_measured = f"not measured, copied from links.inside; replace it to plan for more than {most} processes"
    return Device.model_validate(
        {
            "name": f"{processor()}, {quantity(cores, 'core')} for {quantity(most, 'process')}",
            "kind": "cpu",
            "memory_bytes": max(1.0, alone[0].memory_bytes / most),
            "ranks_per_node": most,
            "cores": max(1, cores // alone[0].threads),
            "flops": {alone[0].precision: points([each.products for each in alone])},
            "memory_bytes_per_s": points([each.memory for each in alone]),
            "operation_s": median(each.operation_s for each in alone),
            "view_s": median(each.view_s for each in alone),
            "links": {"inside": inside, "between": inside, "shared": shared},
            "overlaps": False,
            "crowding": crowding,
            "step_scale": scale,
            "micro_batch_s": besides,
            "sources": {
                "memory_bytes": f"memory of the machine, divided among {quantity(most, 'process')}",
                "flops": f"{what}: matrix products of the sizes in a step of the run's model",
                "memory_bytes_per_s": f"{what}: additions, by the bytes that one reads and writes",
                "operation_s": f"{what}: an addition of four numbers",
                "links.inside": f"{what}: all-to-all and all-gather of all ranks at once" if shared else "one process",
                "links.between": not_measured,
                "overlaps": "assumed: on a CPU, communication and computation share the cores",
                "crowding": f"{what}: single-process step on all ranks at once, relative to the step alone",
                "step_scale": f"{what}: phases of a single-process step, relative to the sum of their operations",
                "micro_batch_s": f"{what}: rest of a single-process step, per micro-batch",
                "engine_s": f"{what}: time of a strategy on two processes beyond its operations, per micro-batch",
                "wait_s": f"{what}: time of a step on two processes beyond its estimate, per message",
                "cores": "cores of the machine divided by the run's threads per process",
            },
        }
    )


def device_of(
    run: Run, rates_of_rounds: Sequence[Mapping[int, Rates]], every: Mapping[str, Sequence[Simulated]]
) -> Device:
    """Return the complete device: `shape_of`, with step_scale, micro_batch_s, engine_s and wait_s from comparing
    measured steps with simulated ones. `every`: strategy -> its simulated ranks."""
    of = every["single"][0]
    plain = shape_of(rates_of_rounds).model_copy(update={"crowding": {}})
    summed = computed(Job.of(run, 1), of, plain)
    names = {name for each in rates_of_rounds for name in each[1].phases}
    took = {name: median(each[1].phases.get(name, 0.0) for each in rates_of_rounds) for name in names}
    besides = max(0.0, took.pop("other", 0.0) - summed.pop("other", 0.0)) / max(1, rates_of_rounds[0][1].micro_batches)
    both = [each.get(name, 0.0) for each in (took, summed) for name in ("forward", "backward")]
    # the stages of a pipeline mix forward and backward
    took["forward+backward"], summed["forward+backward"] = sum(both[:2]), sum(both[2:])
    scale = {name: took[name] / s for name, s in summed.items() if s and took.get(name, 0.0) > 0}
    device = shape_of(rates_of_rounds, scale, besides)
    device = device.model_copy(update={"engine_s": engines(run, rates_of_rounds, every, device)})
    return device.model_copy(update={"wait_s": waits(run, rates_of_rounds, every, device)})


def engines(
    run: Run, rates_of_rounds: Sequence[Mapping[int, Rates]], every: Mapping[str, Sequence[Simulated]], device: Device
) -> dict[str, float]:
    """Return engine -> compute seconds per micro-batch beyond its operations, without the slowdown of shared cores."""
    beyond, alone = {}, device.model_copy(update={"crowding": {}})
    for name in (name for name in ENGINES if name in every):
        job, count = Job.of(run.with_keys("strategy", **ENGINES[name]), STRATEGIES_ON), STRATEGIES_ON
        summed = [computed(job, each, alone) for each in every[name]]
        planned = [sum(s for phase, s in each.items() if phase not in NOT_THE_ENGINES) for each in summed]
        busy = [
            sum(s for phase, s in each[1].phases.items() if phase not in NOT_THE_ENGINES) for each in rates_of_rounds
        ]
        slower = median(each[count].busy_s / one for each, one in zip(rates_of_rounds, busy, strict=True))
        took = median(each[count].engines[name] for each in rates_of_rounds) / slower
        beyond[name] = max(0.0, took - sum(planned) / len(planned)) / every[name][0].micro_batches
    return beyond


def waits(
    run: Run, rates_of_rounds: Sequence[Mapping[int, Rates]], every: Mapping[str, Sequence[Simulated]], device: Device
) -> dict[str, float]:
    """Return strategy -> wall-clock seconds per message by which its measured step exceeds the estimate."""
    beyond = {}
    for name in (name for name in STRATEGIES if name in every):
        job = Job.of(run.with_keys("strategy", **STRATEGIES[name]), STRATEGIES_ON).with_data()
        planned = estimate(job, every[name], device, planner.feed_of(job)).step_s
        took = median(each[STRATEGIES_ON].steps[name] for each in rates_of_rounds)
        beyond[name] = max(0.0, took - planned) / max(1.0, *(each.messages for each in every[name]))
    return beyond


def points(rounds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return (size, median rate over rounds), by size."""
    by_size: dict[float, list[float]] = {}
    for each in rounds:
        for size, rate in each:
            by_size.setdefault(size, []).append(rate)
    return [(size, median(rates)) for size, rates in sorted(by_size.items())]


def link_of(rounds: Sequence[Rates]) -> dict[str, Any]:
    """Return the `Link` fields of ranks that all send at the same time."""
    latency = median(each.latency_s for each in rounds)
    return {"bytes_per_s": points([each.messages for each in rounds]), "latency_s": latency}


def write(device: Device, path: Path) -> None:
    """Write the device file. Errors: `RunError` if it cannot be written, or a figure is not finite."""
    check_finite(device.model_dump(mode="python"))
    content = _short(device.model_dump(mode="json", exclude_none=True))
    sources = {"sources": content.pop("sources")}
    text = yaml.safe_dump(content, sort_keys=False, width=120, default_flow_style=None)
    text += yaml.safe_dump(sources, sort_keys=False, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError("LS8044", f"--out: {path} cannot be written: {error.strerror}; give another --out") from error


def check_finite(figures: Mapping[str, Any]) -> None:
    """Check that all figures are finite. Errors: `RunError` for the first that is not."""
    if bad := [key for key, value in flat(figures).items() if not math.isfinite(value)]:
        raise RunError(
            "LS8045", f"--calibrate: the measured {bad[0]} is not finite, so nothing is written; run it again"
        )


def flat(thing: Any, at: str = "") -> dict[str, float]:
    """Return path -> value for every nested float."""
    if isinstance(thing, dict):
        parts = thing.items()
    elif isinstance(thing, list | tuple):
        parts = dict(enumerate(thing)).items()
    else:
        return {at: thing} if isinstance(thing, float) else {}
    return {key: number for name, part in parts for key, number in flat(part, f"{at}.{name}".lstrip(".")).items()}


def _short(thing: Any) -> Any:
    """Round all nested floats to four digits, the precision of the measurement."""
    if isinstance(thing, dict):
        return {key: _short(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_short(value) for value in thing]
    return float(f"{thing:.4g}") if isinstance(thing, float) and math.isfinite(thing) else thing
