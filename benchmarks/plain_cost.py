"""What the comparison with a plain computation costs before the first step: processor time, clock and peak memory.

In: pairs of starts, and entries of the run file (default: the quick start as one process). Out: a table, and every
start as a line of JSON in --out. Of each pair one start has `verify.plain: true` and one `false`, by turns; each is a
process of its own that ends where its first step would begin. Beside the pairs stands what the comparison itself took
in the same process, which other programs on the machine disturb less. Caches are filled by a start before them.
Example: python benchmarks/plain_cost.py --pairs 8 --out plain-cost.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "MEASURED "  # prefix of the line that a start prints
ALONE = ["launch.processes=1", "launch.threads=1", "launch.device=cpu", "task.samples=0"]


def processor() -> float:
    """CPU seconds of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def memory(name: str) -> int:
    """Resident memory of this process in MiB: VmRSS, or VmHWM since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) // 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def start(entries: list[str]) -> None:
    """Train up to the first step, print the costs, and end the process."""
    began = time.perf_counter()
    import lockstep.cli
    from lockstep.training import loop, plain_check, startup

    said: dict[str, Any] = {}

    def measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            forget_peak()
            before = processor(), time.perf_counter(), memory("VmRSS")
            result = function(*arguments, **keys)
            said[f"{name} processor_s"] = processor() - before[0]
            said[f"{name} clock_s"] = time.perf_counter() - before[1]
            said[f"{name} peak_mib"] = memory("VmHWM")
            said[f"{name} more_mib"] = memory("VmHWM") - before[2]
            return result

        return call

    def first_step(session: Any, step: int) -> Any:
        said["processor_s"], said["clock_s"] = processor(), time.perf_counter() - began
        print(MARK + json.dumps({key: round(value, 4) for key, value in said.items()}), flush=True)
        os._exit(0)

    plain_check.check = measured("comparison", plain_check.check)
    startup.try_a_step = measured("dry run", startup.try_a_step)
    loop.batches = first_step
    lockstep.cli.main(["train", *entries])


def once(plain: bool, entries: list[str]) -> dict[str, Any]:
    """Do one start in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--start", *ALONE, *entries, f"output={folder}/out"]
        command.append(f"verify.plain={str(plain).lower()}")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise SystemExit(f"a start ended with {run.returncode}: {run.stdout[-800:]}{run.stderr[-800:]}")
    measured: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return {"plain": plain} | measured


def spread(values: list[float], digits: int = 3) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(starts: list[dict[str, Any]]) -> str:
    """Format as Markdown: medians and quartiles over the pairs."""
    with_plain, without = ([each for each in starts if each["plain"] is plain] for plain in (True, False))
    said = ["| to the first step | without | with | with / without, by pairs | the comparison itself | of the whole |"]
    said.append("|---|---|---|---|---|---|")
    for name, key in (("processor time, s", "processor_s"), ("clock, s", "clock_s")):
        ratios = [a[key] / b[key] for a, b in zip(with_plain, without, strict=True)]
        own = [each[f"comparison {key}"] for each in with_plain]
        shares = [each[f"comparison {key}"] / each[key] for each in with_plain]
        columns = [spread([each[key] for each in some], 2) for some in (without, with_plain)]
        said.append(f"| {name} | {' | '.join(columns)} | {spread(ratios)} | {spread(own)} | {spread(shares)} |")
    peaks = {name: [each[f"{name} peak_mib"] for each in with_plain] for name in ("dry run", "comparison")}
    more = [each["comparison more_mib"] for each in with_plain]
    said += ["", f"Peak memory, MiB: {spread(peaks['dry run'], 0)} in the dry run before it, "]
    said[-1] += f"{spread(peaks['comparison'], 0)} in the comparison, {spread(more, 0)} more than when it began"
    return "\n".join(said)


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        start(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entries", nargs="*", help="of the run file, as key=value, or a run file before them")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    once(True, options.entries)  # warm up the caches
    starts = []
    for number in range(options.pairs):
        for plain in (number % 2 == 0, number % 2 == 1):
            starts.append({"date": time.strftime("%Y-%m-%d"), "pair": number} | once(plain, options.entries))
            print(json.dumps(starts[-1]), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(starts[-1]) + "\n")
    print(table(starts))


if __name__ == "__main__":
    main()
