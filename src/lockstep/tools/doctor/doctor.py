"""`lockstep doctor`: what this machine can run, and, with several processes, what lies between them.

In: a folder for checkpoints, and a number of processes or the variables of a launcher. Out: a report on the terminal or
as JSON, and the exit status: 1 when something differs between ranks that would break exactness, or they do not meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.config.run import QUICK_START, RunError, load
from lockstep.tools.doctor import machine
from lockstep.tools.doctor.machine import Facts
from lockstep.track.console import Console

MEET_S = 60.0  # that ranks wait for each other
PROCESSES_S = 240.0  # that processes started here may take in all


def doctor(folder: Path, processes: int | None, as_json: bool, device: str = "auto") -> int:
    """The whole command. Under a launcher every rank calls it, and rank 0 speaks."""
    joining = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not folder.is_dir() and not joining:  # a rank that leaves would keep the others waiting
        raise RunError(f"--folder: there is no folder {folder}")
    if joining and processes is not None:
        raise RunError("--processes: these processes were started by a launcher already; leave it out")
    speaks = os.environ.get("RANK", "0") == "0"
    report: dict[str, Any] = {}
    if joining:  # first, so that ranks do not wait for the slower look at rank 0's machine
        report["ranks"] = between(folder, device)
    elif processes is not None:
        report["ranks"] = started(folder, processes, device)
    if speaks:
        report = machine.probe(folder) | report
        report["problems"] = problems(report)
        if as_json:
            print(json.dumps(report, indent=2))
        else:
            tell(report)
    return int(breaks(report))


def between(folder: Path, device: str) -> Facts:
    """What lies between the ranks of this job, or `{"failed": why}`. Collective."""
    from lockstep.distributed.world import World
    from lockstep.tools.doctor import between_ranks

    overrides = [f"launch.timeout_s={MEET_S:g}", f"launch.device={device}"]
    world = None
    try:
        world = World(load(None, overrides, QUICK_START))
        world.join()
        return between_ranks.probe(world, folder)
    except Exception as error:  # no address, a rank that is missing, a network that drops packets
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        if world is not None:
            world.close()


def started(folder: Path, processes: int, device: str) -> Facts:
    """Start so many processes on this machine under torchrun, and measure between them."""
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as aside:
        answer = Path(aside) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "lockstep", "doctor", "--folder", str(folder), "--device", device, "--into", str(answer)]
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # torchrun sets it too, and says so at length
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=PROCESSES_S,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            return dict(json.loads(answer.read_text(encoding="utf-8")))
        except subprocess.TimeoutExpired:
            return {"failed": f"{processes} processes did not end in {PROCESSES_S:g} s"}
        except (OSError, ValueError):
            said = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"failed": f"{processes} processes ended with {done.returncode}: {' '.join(said[-1:])[:300]}"}


def into(path: Path, folder: Path, device: str) -> int:
    """One of the processes that `started` starts: rank 0 leaves what was found in a file."""
    found = between(folder, device)
    if os.environ.get("RANK") == "0":
        path.write_text(json.dumps(found), encoding="utf-8")
    return 0


def breaks(report: dict[str, Any]) -> bool:
    """Whether ranks did not meet, or differ in what exact bits depend on."""
    ranks = report.get("ranks", {})
    return "failed" in ranks or any(each["breaks"] for each in ranks.get("differs", ()))


def problems(report: dict[str, Any]) -> list[str]:
    """What a person should mend, worst first."""
    found = [f"{name}: {facts['failed']}" for name, facts in report.items() if "failed" in facts]
    ranks, disk = report.get("ranks", {}), report.get("folder", {})
    for each in ranks.get("differs", ()):
        if each["breaks"]:
            found.append(f"{each['what']} differs between ranks ({_sides(each)}): {each['breaks']}")
    if (skew := ranks.get("clock_skew_ms", {}).get("largest", 0.0)) > 1000:
        found.append(
            f"the clock of rank {ranks['clock_skew_ms']['rank']} is off by {skew / 1e3:.1f} s: run an NTP client"
        )
    if slow := ranks.get("compute", {}).get("slow_ranks"):
        found.append(
            f"rank(s) {', '.join(map(str, slow))} compute at less than 0.7 of the middle speed: all wait for them"
        )
    for host, facts in ranks.get("folder", {}).get("of_host", {}).items():
        if "failed" in facts:
            found.append(f"folder on {host}: {facts['failed']}")
    if len(ranks.get("hosts", {})) > 1 and not ranks["folder"]["shared_by_all"]:
        found.append(f"{disk.get('path')} is not the same folder on every host: rank 0 alone would write checkpoints")
    if disk.get("free_gb", 10) < 5:
        found.append(f"{disk['path']} has {disk['free_gb']} GiB left for checkpoints")
    for name, cache in report.get("caches", {}).items():
        if isinstance(cache, dict) and not cache["writable"]:
            found.append(f"the cache of {name} at {cache['path']} cannot be written")
    network = report.get("network", {})
    if "failed" not in network and not network.get("host_resolves") and not network.get("GLOO_SOCKET_IFNAME"):
        found.append("the host's own name does not resolve, which gloo and torchrun need: set GLOO_SOCKET_IFNAME")
    return found


# -- for a person ----------------------------------------------------------------------------------------------------


def tell(report: dict[str, Any]) -> None:
    """The report as text."""
    console = Console(True)
    for name, facts in report.items():
        if name in ("ranks", "problems"):
            continue
        console.columns(name, rows_of(name, facts))
    if "ranks" in report:
        _tell_ranks(console, report["ranks"])
    for problem in report["problems"]:
        console.say(f"problem: {problem}")
    console.say("no problem found" if not report["problems"] else f"{len(report['problems'])} problem(s)")


def _tell_ranks(console: Console, ranks: Facts) -> None:
    if "failed" in ranks:
        return
    plain = {key: value for key, value in ranks.items() if key not in ("differs", "folder")}
    console.columns("ranks", rows_of("ranks", plain))
    for host, facts in ranks["folder"]["of_host"].items():
        console.columns(f"folder on {host}", rows_of("folder", facts))
    rows = [
        [each["what"], _sides(each), f"yes: {each['breaks']}" if each["breaks"] else "no"] for each in ranks["differs"]
    ]
    if rows:
        console.table("what differs between ranks", ["what", "where", "breaks exactness"], rows)
    else:
        console.say(f"all {ranks['size']} rank(s) are alike")


def _sides(each: dict[str, Any]) -> str:
    """`2.13.0 on host-a (ranks 0, 1); 2.12.1 on host-b (ranks 2, 3)`."""
    return "; ".join(
        f"{side['value']} on {', '.join(side['hosts'])} (rank{'s' if len(side['ranks']) > 1 else ''} "
        f"{', '.join(map(str, side['ranks'][:8]))}{', ...' if len(side['ranks']) > 8 else ''})"
        for side in each["sides"]
    )


def rows_of(name: str, facts: Facts) -> list[tuple[str, str]]:
    """A row for each fact of a section; what is not there is told last, on one row."""
    if name not in ("packages", "tokens", "programs") or "failed" in facts:
        return [(key, _text(each)) for key, each in facts.items() if each not in (None, [], {})]
    there = [(key, "yes" if each is True else str(each)) for key, each in facts.items() if each]
    absent = {"packages": "not installed", "tokens": "not set", "programs": "not found"}[name]
    gone = ", ".join(key for key, each in facts.items() if not each)
    return [*there, *([(absent, gone)] if gone else [])]


def _text(value: Any) -> str:
    """Nested facts on a line: `cores 2, python 3.11.2, devices ...`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each not in (None, [], {}))
    if isinstance(value, list):
        return "; ".join(_text(each) for each in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
