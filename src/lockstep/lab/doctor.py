"""`lockstep doctor`: report what this machine can run, how processes communicate, and whether strategies keep their
promise.

In: a folder for checkpoints, and a number of processes or the variables of a launcher. Out: a report on the terminal
or as JSON, and the exit status: 1 if ranks differ in something that exactness depends on, or
cannot connect.

`probe` runs on ranks that have joined and is collective: it measures the speed of an all-reduce and the skew of clocks,
and lists settings that differ between ranks, with ranks and hosts; some of them would break the promise of
`strategy.exact` (see README, "The promise"). `selftest` (`--selftest`) runs a few steps of a small job under every
strategy in each precision, compares them with the same steps of one process as `lockstep verify` does, and writes one
page about them and the machine, which can be shared: it contains no tokens and no host name."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import plugins
from lockstep.config.run import QUICK_START, Run, RunError, load, write_run_yaml
from lockstep.config.sections import ALONE
from lockstep.data.job import strategy_class
from lockstep.distributed.hardware import available_cores, gpus_of, processor
from lockstep.distributed.world import World
from lockstep.lab import machine_info
from lockstep.lab.machine_info import Facts
from lockstep.lab.subprocess_job import Child
from lockstep.track import json_output
from lockstep.track.console import Console
from lockstep_trace.coded import quantity

MEET_S = 60.0  # how long ranks wait for each other
PROCESSES_S = 240.0  # time limit of all processes started here


def doctor(folder: Path, processes: int | None, as_json: bool, device: str = "auto") -> int:
    """Run the whole command. Under a launcher every rank calls it, and rank 0 prints."""
    joining = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not folder.is_dir() and not joining:  # a rank that leaves would keep the others waiting
        raise RunError("LS8170", f"--folder: no such folder: {folder}")
    if joining and processes is not None:
        raise RunError(
            "LS8171",
            "--processes: cannot be used inside of a launcher, which has started the processes already; remove it",
        )
    speaks = os.environ.get("RANK", "0") == "0"
    report: dict[str, Any] = {}
    if joining:  # first, so that ranks do not wait for rank 0's slower look at its machine
        report["ranks"] = between(folder, device)
    elif processes is not None:
        report["ranks"] = started(folder, processes, device)
    if speaks:
        report = machine_info.probe(folder) | report
        report["problems"] = problems(report)
        if as_json:
            json_output.emit("doctor", int(breaks(report)), report)
        else:
            tell(report)
    return int(breaks(report))


def between(folder: Path, device: str) -> Facts:
    """Compare and measure the ranks of this job, or return `{"failed": why}`. Collective."""
    overrides = [f"launch.timeout_s={MEET_S:g}", f"launch.device={device}"]
    world = None
    try:
        world = World(load(None, overrides, QUICK_START))
        world.join()
        return probe(world, folder)
    except Exception as error:  # no address, a missing rank, a network that drops packets
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        if world is not None:
            world.close()


def started(folder: Path, processes: int, device: str) -> Facts:
    """Start processes on this machine under torchrun, and measure between them, unless they cannot meet."""
    if processes > 1 and "failed" in machine_info.several_processes():
        return {"failed": "not started, because processes on this machine cannot train together: see `processes`"}
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as aside:
        answer = Path(aside) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "lockstep", "doctor", "--folder", str(folder), "--device", device, "--into", str(answer)]
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # otherwise torchrun sets it, with a long warning
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PROCESSES_S,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            return dict(json.loads(answer.read_text(encoding="utf-8")))
        except subprocess.TimeoutExpired:
            return {"failed": f"{processes} processes did not end in {PROCESSES_S:g} s"}
        except (OSError, ValueError):
            error_lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"failed": f"{processes} processes ended with {done.returncode}: {' '.join(error_lines[-1:])[:300]}"}


def into(path: Path, folder: Path, device: str) -> int:
    """Run one of the processes that `started` starts; rank 0 writes the result to a file."""
    facts = between(folder, device)
    if os.environ.get("RANK") == "0":
        path.write_text(json.dumps(facts), encoding="utf-8")
    return 0


def breaks(report: dict[str, Any]) -> bool:
    """Return whether ranks failed to connect, or differ in something that exactness depends on."""
    ranks = report.get("ranks", {})
    return "failed" in ranks or any(each["breaks"] for each in ranks.get("differs", ()))


def problems(report: dict[str, Any]) -> list[str]:
    """List the problems to fix, worst first."""
    failures = [f"{name}: {facts['failed']}" for name, facts in report.items() if "failed" in facts]
    ranks, disk = report.get("ranks", {}), report.get("folder", {})
    for each in ranks.get("differs", ()):
        if each["breaks"]:
            failures.append(f"{each['what']} differs between ranks ({_sides(each)}): {each['breaks']}")
    if (skew := ranks.get("clock_skew_ms", {}).get("largest", 0.0)) > 1000:
        failures.append(
            f"the clock of rank {ranks['clock_skew_ms']['rank']} is off by {skew / 1e3:.1f} s: run an NTP client"
        )
    if slow := ranks.get("compute", {}).get("slow_ranks"):
        failures.append(
            f"{'rank' if len(slow) == 1 else 'ranks'} {', '.join(map(str, slow))} compute at less than 0.7 times "
            f"the median speed: all others wait for them"
        )
    for host, facts in ranks.get("folder", {}).get("of_host", {}).items():
        if "failed" in facts:
            failures.append(f"folder on {host}: {facts['failed']}")
    if len(ranks.get("hosts", {})) > 1 and not ranks["folder"]["shared_by_all"]:
        failures.append(
            f"{disk.get('path')} is not the same folder on every host: rank 0 alone would write checkpoints"
        )
    if disk.get("free_gb", 10) < 5:
        failures.append(f"{disk['path']} has {disk['free_gb']} GiB left for checkpoints")
    for name, cache in report.get("caches", {}).items():
        if isinstance(cache, dict) and not cache["writable"]:
            failures.append(f"the cache of {name} at {cache['path']} cannot be written")
    network = report.get("network", {})
    if "failed" not in network and not network.get("host_resolves") and not network.get("GLOO_SOCKET_IFNAME"):
        failures.append("the host's own name does not resolve, which gloo and torchrun need: set GLOO_SOCKET_IFNAME")
    return failures


# -- text output -------------------------------------------------------------------------------------------------------


def tell(report: dict[str, Any]) -> None:
    """Format the report as text."""
    console = Console(True)
    for name, facts in report.items():
        if name in ("ranks", "problems"):
            continue
        console.columns(name, rows_of(name, facts))
    if "ranks" in report:
        _tell_ranks(console, report["ranks"])
    for problem in report["problems"]:
        console.say(f"problem: {problem}")
    console.say(f"verdict: {verdict(report)}")


def verdict(report: dict[str, Any]) -> str:
    """Summarize in one sentence: whether training can start here, on what, and the number of problems."""
    torch_facts, count = report.get("torch", {}), len(report["problems"])
    listed = f"; {count} problem{'s' * (count > 1)} above" if count else "; no problem found"
    if str(torch_facts.get("failed", "")).startswith(machine_info.NO_ANSWER):
        return (
            f"undecided: torch reported {torch_facts['failed']}, perhaps because the machine is busy; try again{listed}"
        )
    if "failed" in torch_facts or not torch_facts.get("version"):
        return f"this machine cannot train: torch does not start{listed}"
    cores, devices = report.get("machine", {}).get("cores"), torch_facts.get("devices") or []
    where = (
        f"on {len(devices)} GPU{'s' * (len(devices) > 1)}" if devices else f"on {cores} CPU cores; torch sees no GPU"
    )
    if "failed" in report.get("processes", {}):
        where = f"with one process only, {where}"
    network = report.get("network", {})
    hub = "; the Hub cannot be reached, so models and data have to be local" * (network.get("hub_reachable") is False)
    if network.get("offline") not in (None, "", "0"):
        hub = "; HF_HUB_OFFLINE is set, so models and data have to be local or in the Hub's cache"
    if breaks(report):
        return f"these ranks cannot train together with the same bits{hub}{listed}"
    return f"this machine trains {where}{hub}{listed}"


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
        console.say("no differences between ranks")


def _sides(each: dict[str, Any]) -> str:
    """Format a difference: `2.13.0 on host-a (ranks 0, 1); 2.12.1 on host-b (ranks 2, 3)`."""
    return "; ".join(
        f"{side['value']} on {', '.join(side['hosts'])} (rank{'s' if len(side['ranks']) > 1 else ''} "
        f"{', '.join(map(str, side['ranks'][:8]))}{', ...' if len(side['ranks']) > 8 else ''})"
        for side in each["sides"]
    )


def rows_of(name: str, facts: Facts) -> list[tuple[str, str]]:
    """One row per fact of a section; missing facts share the last row."""
    if name not in ("packages", "tokens", "programs") or "failed" in facts:
        return [_row(key, each) for key, each in facts.items() if each not in (None, [], {})]
    there = [(key, "yes" if each is True else str(each)) for key, each in facts.items() if each]
    absent = {"packages": "not installed", "tokens": "not set", "programs": "not found"}[name]
    gone = ", ".join(key for key, each in facts.items() if not each)
    return [*there, *([(absent, gone)] if gone else [])]


# Suffix of a fact's name -> its unit.
_UNITS = {"_mb_s": "MB/s", "_gb": "GB", "_ms": "ms", "_gflops": "GFLOP/s", "_s": "s"}


def _row(key: str, value: Any) -> tuple[str, str]:
    """Label of a fact, and its value with its unit. Names of variables and hosts stay as they are."""
    ending = next((ending for ending in _UNITS if key.endswith(ending)), "")
    text = _text(value)
    name = key.removesuffix(ending)
    return name.replace("_", " ") if name.islower() else name, f"{text} {_UNITS[ending]}" if ending else text


def _text(value: Any) -> str:
    """Nested facts in one line: `cores 2, python 3.11.2, devices ...`."""
    if isinstance(value, dict):
        return ", ".join(" ".join(_row(key, each)) for key, each in value.items() if each not in (None, [], {}))
    if isinstance(value, list):
        return "; ".join(_text(each) for each in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# What must be equal on all ranks for the same bits -> why.
EXACT = {
    "lockstep-train": "another version may compute in another order",
    "torch": "another version may compute in another order",
    "transformers": "another version may build another model",
    "tokenizers": "another version may tokenize texts differently",
    "device": "devices of different kinds give different bits",
    "processor": "processors of different models may give different bits",
    "instructions": "other instruction sets may add in another order",
    "cores": "launch.threads: auto depends on them; set launch.threads",
    "OMP_NUM_THREADS": "the number of threads changes bits",
    "driver": "another version of CUDA may compute in another order",
}
_SMALL, _LARGE = 1, 4 * 2**20  # float32 numbers in an all-reduce: to measure latency, and bandwidth (16 MiB)


def probe(world: World, folder: Path, seconds: float = 3.0) -> dict[str, Any]:
    """Collect all facts between ranks. Collective. Each all-reduce speed takes about `seconds` at most."""
    everyone = world.all_gather(of_rank(world))
    facts: dict[str, Any] = {
        "size": world.size,
        "hosts": Counter(rank["host"] for rank in everyone),
        "devices": Counter(rank["device"] for rank in everyone),
        "differs": differing_settings(everyone),
    }
    if world.size > 1:
        latency, took = all_reduce(world, _SMALL, seconds), all_reduce(world, _LARGE, seconds)
        sent_bytes = _LARGE * 4 * 2 * (world.size - 1) / world.size  # bytes a rank sends in a ring, as nccl-tests count
        facts["all_reduce"] = {
            "backend": "nccl" if world.device.type == "cuda" else "gloo",
            "latency_us": round(latency * 1e6, 1),
            "bytes": _LARGE * 4,
            "ms": round(took * 1e3, 2),
            "bus_mb_s": round(sent_bytes / took / 1e6),
        }
    speeds = world.all_gather(_gflops(world.device))
    middle = statistics.median(speeds)
    facts["compute"] = {"median_gflops": round(middle), "lowest_gflops": round(min(speeds))}
    facts["compute"]["slow_ranks"] = [rank for rank, speed in enumerate(speeds) if speed < 0.7 * middle]
    skews = clock_skew(world)
    largest = max(range(world.size), key=lambda rank: abs(skews[rank]))
    facts["clock_skew_ms"] = {"largest": round(abs(skews[largest]) * 1e3, 3), "rank": largest}
    facts["folder"] = folders(world, folder)
    return facts


def of_rank(world: World) -> dict[str, Any]:
    """Facts of this rank that must be equal on all ranks. Not collective."""
    cuda = world.device.type == "cuda"
    facts: dict[str, Any] = {
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if cuda else "CPU",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": None if cuda else available_cores(),
        "OMP_NUM_THREADS": None if cuda else os.environ.get("OMP_NUM_THREADS"),
        "processor": None if cuda else processor(),
        "instructions": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "driver": torch.version.cuda if cuda else None,
    }
    return facts | {name: machine_info.version(name) for name in machine_info.PACKAGES}


def differing_settings(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the settings that differ between ranks: name, value by rank and host, and the reason if a difference breaks
    exactness."""
    differing = []
    for name in everyone[0]:
        values = [rank[name] for rank in everyone]
        if name == "host" or all(value == values[0] for value in values):
            continue
        sides = []
        for value in dict.fromkeys(map(str, values)):
            ranks = [rank for rank, other in enumerate(values) if str(other) == value]
            sides.append({"value": value, "ranks": ranks, "hosts": sorted({everyone[rank]["host"] for rank in ranks})})
        differing.append({"what": name, "sides": sides, "breaks": EXACT.get(name)})
    return differing


def all_reduce(world: World, numbers: int, seconds: float) -> float:
    """Median seconds of an all-reduce of `numbers` float32 values, on the slowest rank. Collective; at least two
    ranks."""
    tensor = torch.zeros(numbers, device=world.device)
    rounds, times = 5, []
    for part in range(2):  # a few rounds first, to see how many fit into the time
        for _ in range(rounds):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if tensor.device.type == "cuda":
                torch.cuda.synchronize(tensor.device)
            times.append(time.perf_counter() - start)
        if part == 0:
            slowest = max(world.all_gather(statistics.median(times)))
            rounds, times = max(3, min(200, int(seconds / slowest))), []
    return float(max(world.all_gather(statistics.median(times))))


def clock_skew(world: World, rounds: int = 9) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's: the best of some exchanges, as in NTP. The error is at
    most half of the fastest exchange. Collective."""
    skews = [0.0] * world.size
    box = torch.zeros(1, dtype=torch.float64)  # on the CPU: works with gloo, whatever backend carries gradients
    for rank in range(1, world.size):
        best = float("inf")
        for _ in range(rounds):
            if world.rank == rank:
                dist.recv(box, src=0)
                box[0] = time.time()
                dist.send(box, dst=0)
            elif world.is_main:
                sent_at = time.time()
                dist.send(box, dst=rank)
                dist.recv(box, src=rank)
                back = time.time()
                if back - sent_at < best:
                    best, skews[rank] = back - sent_at, float(box) - (sent_at + back) / 2
    skew: list[float] = world.broadcast(skews)
    return skew


def folders(world: World, folder: Path) -> dict[str, Any]:
    """Speed of the folder on each host, measured by one rank per host at the same time, and whether all hosts see the
    same folder. Collective."""
    token = world.broadcast(f"{os.getpid()}-{time.time_ns()}")
    marker = folder / f".lockstep-doctor-{token}"

    def remove() -> Facts:
        marker.unlink(missing_ok=True)
        return {}

    if world.is_main:
        machine_info.bounded(lambda: {"bytes": marker.write_bytes(b"")}, 5)
    world.barrier()
    visible = world.all_gather(bool(machine_info.bounded(lambda: {"there": marker.exists()}, 5).get("there")))
    mine = machine_info.bounded(lambda: machine_info.file_system(folder), 15) if world.local_rank == 0 else None
    every = world.all_gather((world.host, mine))
    if world.is_main:
        machine_info.bounded(remove, 5)
    return {"shared_by_all": all(visible), "of_host": {host: facts for host, facts in every if facts is not None}}


def _gflops(device: torch.device) -> float:
    """GFLOP/s of float32 matrix products on this rank while the other ranks compute, too."""
    a, best = torch.ones(512, 512, device=device), 0.0
    for _ in range(5):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # wait for the device
        best = max(best, 2 * 512**3 / (time.perf_counter() - start) / 1e9)
    return best


STEPS = 3
LIMIT_S = 600.0  # per job, to catch a backend that hangs
PRECISIONS = ("fp32", "bf16")
COLUMNS = ["strategy", "precision", "processes", "found", "seconds"]
AS_PROMISED = ("same bits", "equal to rounding")  # results that keep the promise
NOT_RUN = ("refused", "not installed")
_SECTIONS = ("machine", "memory", "torch", "packages")  # sections of `machine.probe` on the page
_LINES = 30  # output lines kept of a failed job


@dataclass
class Outcome:
    """Result of one strategy in one precision."""

    strategy: str
    precision: str
    processes: int
    result: str  # one of AS_PROMISED or NOT_RUN, "NOT as promised", "failed" or "took too long"
    why: list[str]  # lines of explanation, if any
    seconds: float

    @property
    def wrong(self) -> bool:
        return self.result not in AS_PROMISED + NOT_RUN

    def row(self) -> list[str]:
        return [self.strategy, self.precision, str(self.processes), self.result, f"{self.seconds:.0f}"]


def selftest(names: Sequence[str], processes: int | None, device: str, page: Path, as_json: bool) -> int:
    """Run the whole self-test. `names`: strategies. Returns 0 if each one that can run here keeps its promise, else 1.
    Errors: `RunError` if none can run, or the page cannot be written."""
    if not page.absolute().parent.is_dir():
        raise RunError("LS8172", f"--page: no such folder: {page.absolute().parent}")
    console = Console(not as_json)
    count = processes or max(2, gpus_of(run_of("single", "fp32", 1, device).launch))
    runs = [[run_of(name, precision, count, device) for name in names] for precision in PRECISIONS]
    console.say(
        f"{STEPS} steps under each strategy, {quantity(count, 'process')}, compared with the same on one process ..."
    )
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-selftest-") as folder:
        for outcome in outcomes_of(Path(folder), runs):
            console.say(f"  {outcome.strategy:14}{outcome.precision:6}{outcome.result}")
            outcomes.append(outcome)
    if all(outcome.result in NOT_RUN for outcome in outcomes):
        raise RunError("LS8173", f"--selftest: no strategy can run on this machine: {' '.join(outcomes[0].why)}")
    facts = {name: section for name, section in machine_info.probe(page.absolute().parent).items() if name in _SECTIONS}
    facts["machine"].pop("host", None)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    if as_json:
        rows = [asdict(outcome) for outcome in outcomes]
        json_output.emit("doctor", int(bool(wrong)), facts, {"outcomes": rows})
    write(page, outcomes, facts)
    as_promised = sum(outcome.result in AS_PROMISED for outcome in outcomes)
    for outcome in outcomes:
        for line in outcome.why[-1:] if outcome.result in NOT_RUN else outcome.why:
            console.say(f"{outcome.strategy}, {outcome.precision}: {line}")
    console.say(
        f"{as_promised} as promised, {len(wrong)} not, {len(outcomes) - as_promised - len(wrong)} not run; {page}"
    )
    return int(bool(wrong))


def run_of(strategy: str, precision: str, processes: int, device: str) -> Run:
    """The test job: the quick start's model with dropout, on a few texts. Errors: `RunError`."""
    count = 1 if strategy == ALONE else processes
    overrides = [
        f"strategy.name={strategy}",
        f"precision={precision}",
        f"launch.processes={count}",
        f"launch.device={device}",
        "launch.threads=1",  # so that one process adds in the same order as several
        f"micro_batches={max(4, 1 << (processes - 1).bit_length())}",
        "model.config.resid_pdrop=0.1",
        "data.limit=400",
    ]
    run = load(None, overrides, QUICK_START)
    gpus = gpus_of(run.launch)
    shared = -(-count // gpus) if gpus else 1
    return run.with_keys("launch", processes_per_gpu=shared)


def outcomes_of(folder: Path, runs: Sequence[Sequence[Run]]) -> Iterator[Outcome]:
    """Run the jobs one after the other; `runs`: all of one precision."""
    for alike in runs:
        alone = folder / alike[0].precision / "alone"
        reference = _job("alone", alike[0], alone)
        for run in alike:
            began = time.monotonic()
            outcome, why = _outcome(run, folder / run.precision / run.strategy.name, alone, reference)
            seconds = time.monotonic() - began
            yield Outcome(run.strategy.name, run.precision, int(run.launch.processes), outcome, why, seconds)


def _outcome(run: Run, folder: Path, alone: Path, reference: tuple[str, list[str]]) -> tuple[str, list[str]]:
    try:
        strategy = strategy_class(run)
        lacking = plugins.lacking(strategy.needs)
    except Exception as caught:  # an engine without the internals that lockstep uses
        return "failed", [f"{type(caught).__name__}: {' '.join(str(caught).split())[:300]}"]
    if lacking:
        return "not installed", [plugins.install(lacking[0])]
    if reference[0]:
        return reference
    count = int(run.launch.processes)
    if strategy.stages_of(run.strategy, count) > 2 and not count % 2:  # several pipelines, of two stages each
        run = run.with_keys("strategy", options={"stages": 2})
    outcome, why = _job("under", run, folder)
    return (outcome, why) if outcome else compared(folder, alone)


def _job(kind: str, run: Run, folder: Path) -> tuple[str, list[str]]:
    """Run a job in its own process. Returns the failure and the output, both empty on success."""
    folder.mkdir(parents=True)
    write_run_yaml(run.into(folder))
    child = Child(f"{__name__}.{kind}", [str(folder / "run.yaml"), str(folder)], folder, "job")
    try:
        ended = child.wait(LIMIT_S)
    finally:  # also after Ctrl-C
        child.kill()
    if not ended:
        return "took too long", [f"still running after {LIMIT_S:g} s", *child.errors.splitlines()[-_LINES:]]
    if child.status == 0:
        return "", []
    lines = [child.reason()] if child.status == 2 else child.errors.splitlines()[-_LINES:] or [child.reason()]
    return "refused" if child.status == 2 else "failed", lines


def under(words: list[str]) -> int:
    """Child process: run the job under its strategy."""
    from lockstep.proof.verify import record_run

    return record_run(load(Path(words[0]), []), Path(words[1]), STEPS)[0]


def alone(words: list[str]) -> int:
    """Child process: run the same job on one process."""
    from lockstep.proof.verify import record_alone

    return record_alone(load(Path(words[0]), []), Path(words[1]), STEPS)


def compared(folder: Path, alone: Path) -> tuple[str, list[str]]:
    """Compare two recordings as `verify` does."""
    from lockstep.proof.recording import read
    from lockstep.proof.verify import compare_recordings, findings, promise

    mine = read(folder)
    if wrong := findings(mine, compare_recordings(folder, alone)):
        return "NOT as promised", [promise(mine), *wrong]
    return AS_PROMISED[0] if mine.bits else AS_PROMISED[1], []


def write(page: Path, outcomes: list[Outcome], facts: dict[str, Any]) -> None:
    """Write the page. Errors: `RunError` if it cannot be written."""
    from lockstep.track.report.report import write_page

    def notes() -> Iterator[tuple[str, list[str]]]:
        for outcome in outcomes:
            if outcome.why:
                lines = [line.replace(str(Path.home()), "~") for line in outcome.why]
                yield f"{outcome.strategy}, {outcome.precision}: {outcome.result}", lines

    try:
        write_page(
            page,
            "selftest.html.jinja",
            title="Does every strategy keep its promise here?",
            columns=COLUMNS,
            rows=[outcome.row() for outcome in outcomes],
            wrong=sum(outcome.wrong for outcome in outcomes),
            notes=list(notes()),
            facts={name: rows_of(name, section) for name, section in facts.items()},
            steps=STEPS,
        )
    except OSError as error:
        raise RunError("LS8174", f"--page: {page} cannot be written: {error.strerror}; give another --page") from error
