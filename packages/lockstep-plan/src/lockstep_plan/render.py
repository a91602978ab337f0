"""Format plans for a terminal and as a page.

In: `Plan`s. Out: rows of a table, and `plan.html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.track.report import charts
from lockstep.track.report.report import write_page
from lockstep.training.model_stats import size
from lockstep_plan.devices import Device
from lockstep_plan.estimate import Estimate
from lockstep_plan.planner import Plan
from lockstep_trace.coded import quantity

KINDS = ("weights", "gradients", "partial sums", "optimizer", "activations", "communication", "buffers")
Lines = dict[str, list[tuple[float, float]]]  # of a chart, by name
LEAST_SHARE = 0.0005  # parts below this share of the whole are left out
COLOUR = {kind: i for i, kind in enumerate(KINDS)}
COLLECTIVES = {
    "allgather_base": "gather",
    "allgather": "gather",
    "reduce_scatter_base": "scatter",
    "reduce_scatter": "scatter",
    "alltoall_base": "all to all",
    "allreduce": "sum",
    "broadcast": "broadcast",
    "send": "to one rank",
}


def name_of(plan: Plan) -> str:
    """Name of a plan's strategy: `fsdp2, gather: step`."""
    options = plan.run.strategy.options
    return ", ".join([plan.run.strategy.name, *(f"{key}: {value}" for key, value in options.items())])


def facts(plan: Plan, device: Device, price: float | None) -> dict[str, str]:
    """Return the rows (name -> text) that describe one plan."""
    assert plan.estimate is not None
    estimate, of = plan.estimate, plan.estimate.at
    machines = -(-plan.processes // device.ranks_per_node)
    waiting = estimate.seconds["waiting"] / estimate.step_s
    rows = {
        "simulated": f"{plan.processes:,} x {device.name} on {quantity(machines, 'machine')}, rank {of.rank} "
        f"uses the most memory",
        "strategy": f"{name_of(plan)}; {of.micro_batches} of {plan.run.micro_batches:,} micro-batches a rank",
        "model": f"{of.parameters / 1e6:,.1f}M parameters, {of.trained / 1e6:,.1f}M trained",
        "at rest": memory_line(of.at_rest),
        "peak": f"{size(estimate.peak)} of {size(device.memory_bytes)} in {of.where}: {memory_line(of.kinds)}",
        "fits": "yes" if estimate.fits else "NO: out of memory",
    }
    for wire in estimate.wire[:6]:
        where = "inside a machine" if wire.inside else "between machines"
        what = f"{COLLECTIVES.get(wire.collective, wire.collective)}, {where}"
        label = "traffic" if "traffic" not in rows else f"traffic {sum(r.startswith('traffic') for r in rows) + 1}"
        rows[label] = (
            f"{what}: {quantity(round(wire.messages), 'message')}, {size(wire.bytes)}, {charts.seconds(wire.seconds)}"
        )
    phases = ", ".join(
        f"{name} {charts.seconds(s)}" for name, s in estimate.seconds.items() if s / estimate.step_s >= 0.001
    )
    rows |= {
        "step": f"{charts.seconds(estimate.step_s)} ({phases})",
        **rate(plan, device),
        "idle": f"{estimate.waiting:.0%} of a step: {waiting:.0%} waits for slower ranks, the rest for messages",
        "padding": f"{plan.padding - 1:.0%}",
        "run": f"{plan.steps:,} steps, {charts.seconds(estimate.step_s * plan.steps)}; {cost(plan, price)}",
    }
    return rows


def rate(plan: Plan, device: Device) -> dict[str, str]:
    """The row of tokens per second, and of MFU if it is known; none for a task without tokens."""
    assert plan.estimate is not None
    if not plan.tokens:
        return {}
    mfu = plan.mfu(device)
    share = f", {100 * mfu:.2g}% of the device's stated rate (MFU)" if mfu else ""
    return {"rate": f"{plan.tokens / plan.estimate.step_s:,.0f} tokens/s{share}"}


def memory_line(kinds: dict[str, int]) -> str:
    """Format bytes by kind in the order of `KINDS`, without negligible kinds."""
    whole = sum(kinds.values()) or 1
    return ", ".join(f"{k} {size(kinds[k])}" for k in KINDS if kinds.get(k, 0) / whole >= LEAST_SHARE)


def cost(plan: Plan, price: float | None) -> str:
    """Device-hours, and their price if given."""
    hours = plan.device_hours
    money = "" if price is None else f", {hours * price:,.2f} at {price:g} an hour"
    return f"{hours:,.4g} device-hours{money}"


def table(plans: Sequence[Plan], price: float | None) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of a comparison: those of strategy, micro-batches and processes that differ."""
    drawn = [plan for plan in plans if plan.estimate is not None]
    rows = [
        {
            "processes": f"{plan.processes:,}",
            "strategy": name_of(plan),
            "micro_batches": f"{plan.run.micro_batches:,}",
            "peak": size(plan.estimate.peak),
            "fits": "yes" if plan.fits else "no",
            "s/step": f"{plan.estimate.step_s:.3g}",
            "idle": f"{plan.estimate.waiting:.0%}",
            "device-hours": f"{plan.device_hours:,.4g}",
            **({} if price is None else {"price": f"{plan.device_hours * price:,.2f}"}),
        }
        for plan in drawn
        if plan.estimate is not None
    ]
    same = {key for key in ("processes", "strategy", "micro_batches") if len({row[key] for row in rows}) == 1}
    columns = [key for key in (rows[0] if rows else {}) if key not in same]
    return columns, [[row[key] for key in columns] for row in rows]


def page(path: Path, title: str, plans: Sequence[Plan], device: Device, price: float | None) -> None:
    """Write the page. Errors: `RunError` if it cannot be written."""
    drawn = [p for p in plans if p.estimate is not None]
    several = len({p.processes for p in drawn}) > 1
    alike = len({name_of(p) for p in drawn}) == 1
    names = {id(p): label(p, several, alike) for p in drawn}
    facts_of_plans = [(names[id(p)], facts(p, device, price)) for p in drawn]
    refused = [f"{name_of(p)}, {p.run.micro_batches} micro-batches: {p.refused}" for p in plans if p.refused]
    try:
        write_page(
            path,
            "plan.html.jinja",
            title=title,
            device=device.model_dump(),
            numbers=table(plans, price),
            plots=plots(drawn, [names[id(p)] for p in drawn], device),
            growth=growth(sorted(drawn, key=lambda p: p.processes)) if several and alike else [],
            shown=facts_of_plans,
            refused=refused,
        )
    except OSError as error:
        raise RunError("LS8340", f"--out: {path} cannot be written: {error.strerror}; give another --out") from error


def plots(plans: Sequence[Plan], names: Sequence[str], device: Device) -> list[str]:
    """Memory by kind and time by phase, one bar per plan."""
    estimates = [(name, plan.estimate) for name, plan in zip(names, plans, strict=True) if plan.estimate is not None]
    kinds = {kind: f"c{COLOUR[kind]}" for kind in KINDS}
    times = {name: each.seconds for name, each in estimates}
    phases = dict.fromkeys(phase for of_step in times.values() for phase in of_step)
    has = f"the device has {size(device.memory_bytes)}"
    return [
        charts.bars(
            f"peak memory of the rank that uses the most; {has}",
            by_kind(estimates, True),
            kinds,
            format_value=size,
        ),
        charts.bars("memory of that rank between steps", by_kind(estimates, False), kinds, format_value=size),
        charts.bars(
            "time of a step by phase" + (", as shares" if len(estimates) > 1 else ""),
            times,
            {phase: f"c{i % charts.COLOURS}" for i, phase in enumerate(phases)},
            shares=True,
        ),
    ]


def by_kind(estimates: Sequence[tuple[str, Estimate]], peak: bool) -> dict[str, dict[str, float]]:
    """Bytes of each plan's largest rank, in the usual order."""
    rows = ((name, each.at.kinds if peak else each.at.at_rest) for name, each in estimates)
    return {name: {kind: float(kinds[kind]) for kind in KINDS if kind in kinds} for name, kinds in rows}


def growth(plans: Sequence[Plan]) -> list[str]:
    """Charts of quantities that grow or shrink with the number of processes."""
    estimates = [(plan, plan.estimate) for plan in plans if plan.estimate is not None]
    kinds: Lines = {kind: [] for kind in KINDS}
    sent: Lines = {"inside a machine": [], "between machines": []}
    messages: Lines = {level: [] for level in sent}
    for plan, each in estimates:
        for kind, bytes_of_kind in each.at.kinds.items():
            if bytes_of_kind / each.peak >= LEAST_SHARE:
                kinds[kind].append((plan.processes, bytes_of_kind / 1e9))
        for level, inside in zip(sent, (True, False), strict=True):
            wires = [wire for wire in each.wire if wire.inside == inside]
            if wires:
                sent[level].append((plan.processes, sum(wire.bytes for wire in wires) / 1e9))
                messages[level].append((plan.processes, sum(wire.messages for wire in wires) / 1e3))
    parts: Lines = {"step": [(plan.processes, each.step_s) for plan, each in estimates]}
    for name, phase in (("messages", "messages"), ("waiting", "waiting")):
        shares = [(plan.processes, each.seconds[phase], each.step_s) for plan, each in estimates]
        parts[name] = [(count, of_it) for count, of_it, whole in shares if of_it >= LEAST_SHARE * whole]
    hours: Lines = {"device-hours": [(plan.processes, plan.device_hours) for plan, _ in estimates]}
    charted = {
        "peak memory of a rank, GB": kinds,
        "seconds per step": parts,
        "sent per rank and step, GB": sent,
        "messages per rank and step, thousands": messages,
        "device-hours of the run": hours,
    }
    look = charts.ChartStyle("processes", doubling=True, colours=COLOUR)
    return [charts.lines(name, {k: v for k, v in series.items() if v}, look) for name, series in charted.items()]


def label(plan: Plan, several: bool, alike: bool) -> str:
    """Label that distinguishes a plan from the others on its page."""
    parts: list[str] = []
    if several:
        parts.append(quantity(plan.processes, "process"))
    if not (alike and several):
        parts += [name_of(plan), f"{plan.run.micro_batches} micro-batches"]
    return ", ".join(parts)
