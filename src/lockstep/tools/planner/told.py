"""What a plan says, in a terminal and on a page.

In: `Plan`s. Out: rows of a table, and `plan.html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.tools.planner.devices import Device
from lockstep.tools.planner.planner import Plan
from lockstep.track.report import charts
from lockstep.track.report.report import write_page
from lockstep.training.sizes import size

KINDS = ("weights", "gradients", "partial sums", "optimizer", "activations", "on the way", "buffers")
COLLECTIVES = {
    "allgather_base": "gather",
    "allgather": "gather",
    "reduce_scatter_base": "scatter",
    "reduce_scatter": "scatter",
    "alltoall_base": "all to all",
    "allreduce": "sum",
    "broadcast": "broadcast",
    "send": "to a stage",
}


def name_of(plan: Plan) -> str:
    """`fsdp2, gather: step`."""
    options = plan.run.strategy.options
    return ", ".join([plan.run.strategy.name, *(f"{key}: {value}" for key, value in options.items())])


def facts(plan: Plan, device: Device, price: float | None) -> dict[str, str]:
    """One plan."""
    assert plan.found is not None
    found, of = plan.found, plan.found.at
    machines = -(-plan.processes // device.ranks_per_node)
    waiting = found.seconds["waiting"] / found.step_s
    rows = {
        "simulated": f"{plan.processes:,} x {device.name} on {machines:,} machine(s), rank {of.rank} needs most",
        "strategy": f"{name_of(plan)}; {of.micro_batches} of {plan.run.micro_batches:,} micro-batches a rank",
        "model": f"{of.parameters / 1e6:,.1f}M parameters, {of.trained / 1e6:,.1f}M trained",
        "at rest": told(of.at_rest),
        "peak": f"{size(found.peak)} of {size(device.memory_bytes)} in {of.where}: {told(of.kinds)}",
        "fits": "yes" if found.fits else "NO: it will run out of memory",
    }
    for wire in found.wire[:6]:
        where = "inside a machine" if wire.inside else "between machines"
        what = f"{COLLECTIVES.get(wire.collective, wire.collective)}, {where}"
        told_wire = f"{what}: {wire.messages:,.0f} messages, {size(wire.bytes)}, {charts.seconds(wire.seconds)}"
        rows["wire" if "wire" not in rows else f"wire {len([r for r in rows if r.startswith('wire')]) + 1}"] = told_wire
    phases = ", ".join(f"{name} {charts.seconds(s)}" for name, s in found.seconds.items() if s / found.step_s >= 0.001)
    rows |= {
        "step": f"{charts.seconds(found.step_s)} ({phases})",
        "idle": f"{found.waiting:.0%} of a step: {waiting:.0%} for slower ranks, the rest for messages",
        "padding": f"{plan.padding:.2f} computed for each real token",
        "run": f"{plan.steps:,} steps, {charts.seconds(found.step_s * plan.steps)}; {cost(plan, price)}",
    }
    return rows


def told(kinds: dict[str, int]) -> str:
    """Kinds of memory, the usual order, without what is nothing beside the rest."""
    whole = sum(kinds.values()) or 1
    return ", ".join(f"{k} {size(kinds[k])}" for k in KINDS if kinds.get(k, 0) / whole >= 0.0005)


def cost(plan: Plan, price: float | None) -> str:
    """Device-hours, and money where an hour has a price."""
    hours = plan.device_hours
    money = "" if price is None else f", {hours * price:,.2f} at {price:g} an hour"
    return f"{hours:,.4g} device-hours{money}"


def table(plans: Sequence[Plan], price: float | None) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of what was compared."""
    columns = ["strategy", "micro_batches", "peak", "fits", "s/step", "idle", "device-hours"]
    columns += [] if price is None else ["price"]
    cells = []
    for plan in plans:
        if plan.found is None:
            continue
        found = plan.found
        row = [name_of(plan), f"{plan.run.micro_batches}", size(found.peak), "yes" if found.fits else "no"]
        row += [f"{found.step_s:.3g}", f"{found.waiting:.0%}", f"{plan.device_hours:,.4g}"]
        cells.append(row + ([] if price is None else [f"{plan.device_hours * price:,.2f}"]))
    return columns, cells


def page(path: Path, title: str, plans: Sequence[Plan], device: Device, price: float | None) -> None:
    """Errors: `RunError` when it cannot be written."""
    drawn = [p for p in plans if p.found is not None]
    several = len({p.processes for p in drawn}) > 1
    alike = len({name_of(p) for p in drawn}) == 1
    names = {id(p): label(p, several, alike) for p in drawn}
    memory = {names[id(p)]: p.found.at.kinds for p in drawn if p.found is not None}
    times = {names[id(p)]: p.found.seconds for p in drawn if p.found is not None}
    kinds = {kind: f"c{i % charts.COLOURS}" for i, kind in enumerate(KINDS)}
    phases = {
        phase: f"c{i % charts.COLOURS}" for i, phase in enumerate(dict.fromkeys(k for t in times.values() for k in t))
    }
    plots = [
        charts.bars("memory of the rank that needs most, at its peak", memory, kinds, told=charts.size),
        charts.bars("time of a step", times, phases),
    ]
    growth = []
    if several:
        points = sorted(drawn, key=lambda p: p.processes)
        lines = {
            "peak memory of a rank, GB": [(p.processes, p.found.peak / 1e9) for p in points if p.found],
            "seconds of a step": [(p.processes, p.found.step_s) for p in points if p.found],
            "device-hours of the run": [(p.processes, p.device_hours) for p in points],
        }
        growth = [charts.lines(name, {name: series}, charts.Look("processes")) for name, series in lines.items()]
    shown = [(names[id(p)], facts(p, device, price)) for p in drawn]
    refused = [f"{name_of(p)}, {p.run.micro_batches} micro-batches: {p.refused}" for p in plans if p.refused]
    try:
        write_page(
            path,
            "plan.html.jinja",
            title=title,
            device=device.model_dump(),
            numbers=table(plans, price),
            plots=plots,
            growth=growth,
            shown=shown,
            refused=refused,
        )
    except OSError as error:
        raise RunError(f"--out: {path} cannot be written: {error.strerror}") from error


def label(plan: Plan, several: bool, alike: bool) -> str:
    """What tells a plan from the others on its page."""
    parts = [f"{plan.processes:,} processes"] if several else []
    parts += [] if alike and several else [name_of(plan), f"{plan.run.micro_batches} micro-batches"]
    return ", ".join(parts)
