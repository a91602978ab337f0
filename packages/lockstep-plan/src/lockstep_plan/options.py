"""`lockstep plan --simulate` and `--suggest`: check the request, and print the plans.

In: a run and the words of the command line. Out: an exit status: 0, or 1 if no plan fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.config.run import Run, RunError
from lockstep.launchers import start
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep_plan import devices, planner, render
from lockstep_trace.coded import quantity


def answered(
    run: Run, processes: Sequence[int] | None, device: str, suggest: bool, price: float | None, out: str | None
) -> int:
    """Simulate and print the result. Errors: `RunError`."""
    device_rates = devices.load(device)
    counts = sorted(set(processes or [start.launcher_of(run.launch).plan(run).processes]))
    if counts[0] < 1:
        raise RunError("LS8320", f"--processes: invalid value {counts[0]}; expected an integer >= 1")
    if price is not None and price < 0:
        raise RunError("LS8321", f"--price: invalid value {price:g}; expected a number >= 0")
    if out is not None and not out.endswith(".html"):
        raise RunError("LS8322", f"--out: invalid file {out}; expected a name that ends in .html")
    if run.precision not in device_rates.flops and not run.model.trained_in_bfloat16:
        raise RunError("LS8323", f"--device: {device_rates.name} has no flops for precision={run.precision}")
    console = Console(True)
    plans: list[planner.Plan] = []
    ACTIVITY.set("importing torch")
    with console.busy(lambda: ACTIVITY.name), ThreadPoolExecutor(len(counts)) as at_once:
        if suggest:
            each = at_once.map(lambda count: planner.suggest(run, count, device_rates, console.say), counts)
            plans += [plan for several in each for plan in several]
        else:
            plans += at_once.map(lambda count: planner.plan(run, count, device_rates, console.say), counts)
    if suggest or len(plans) > 1:
        of = f", {render.name_of(plans[0])}" if not suggest else ""
        console.table(f"{run.name} on {device_rates.name}{of}", *render.table(plans, price), key="plans")
        for plan in plans:
            if plan.refused is not None:
                console.say(
                    f"cannot run: {render.name_of(plan)}, micro_batches={plan.run.micro_batches}: {plan.refused}"
                )
    else:
        console.facts(render.facts(plans[0], device_rates, price))
    if suggest:
        for count in counts:
            console.say(chosen(count, [p for p in plans if p.processes == count]))
    if out is not None:
        render.page(Path(out), f"{run.name}: plan", plans, device_rates, price)
        console.say(f"page       {out}")
    return 0 if any(p.fits for p in plans) else 1


def chosen(count: int, plans: Sequence[planner.Plan]) -> str:
    """Return the first plan that fits, as words of a command line."""
    best = next((p for p in plans if p.fits), None)
    if best is None:
        return f"no plan fits on {quantity(count, 'process')}: use more, or checkpoint_activations, bf16 or LoRA"
    options = "".join(f" strategy.options.{key}={value}" for key, value in best.run.strategy.options.items())
    return f"choose     strategy.name={best.run.strategy.name}{options} micro_batches={best.run.micro_batches}"
