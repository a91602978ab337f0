"""The museum of silent faults: run every exhibit under `lockstep trace`, and write docs/reference/museum.md and
benchmarks/results/museum.md.

    python benchmarks/silent_faults.py run [--only NAME ...] [--healthy]   prints a line each; nonzero where one is not
    found python benchmarks/silent_faults.py page                                runs all, and writes the page

In: tests/museum/. Each takes some ten seconds on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUSEUM = ROOT / "tests" / "museum"
sys.path.insert(0, str(ROOT / "tests"))

import torch.distributed.fsdp  # noqa: E402
import torch.utils.checkpoint  # noqa: E402, F401

from lockstep_trace import tracer  # noqa: E402
from lockstep_trace.coded import TraceError  # noqa: E402
from lockstep_trace.compare_traces import Comparison, compare_traces  # noqa: E402
from lockstep_trace.findings import findings, proved  # noqa: E402
from lockstep_trace.read import Trace, read  # noqa: E402
from lockstep_trace.terminal import environment_of, prepare  # noqa: E402
from lockstep_trace.tracer import (  # noqa: E402, F401
    Settings,
    engines,
    recorder,
)
from museum.exhibit import Exhibit, Healthy  # noqa: E402
from museum.exhibits import FAULTS, HEALTHY, OWN  # noqa: E402
from museum.patches import PATCHES  # noqa: E402
from museum.reports import FIRST_RUN, FROM_REPORTS, IN_PUBLIC_SCRIPTS, NOT_SHOWN, REPORTS, Report  # noqa: E402


@dataclass(frozen=True)
class Result:
    """`said`: the first finding, or empty; `right`: whether it is the expected cause."""

    said: str
    right: bool


def command(script: str, arguments: str, processes: int) -> list[str]:
    words = [str(MUSEUM / script), *shlex.split(arguments)]
    if processes == 1:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, *words]


TIMEOUT = 600  # seconds per script
LATE = 124  # exit status of a timeout
MODELS = "transformers.models"
NEEDED = {  # imports of the scripts besides torch, made once before forking
    "engines.py": (
        "accelerate",
        "datasets",
        "transformers.trainer",
        f"{MODELS}.bert.modeling_bert",
        f"{MODELS}.gpt2.modeling_gpt2",
    ),
    "sharded.py": ("deepspeed",),
}


class Runs:
    """Traces in a temporary folder; each reference is traced once."""

    def __init__(self, folder: Path, anew: bool) -> None:
        self.folder, self.anew = folder, anew
        self._installed: dict[tuple[str, ...], Path] = {}
        self._known: dict[tuple[str, str, int, bool, tuple[str, ...]], Path] = {}

    def installed(self, libraries: tuple[str, ...]) -> Path:
        """A folder with other versions of libraries, to put before the environment's."""
        if libraries not in self._installed:
            path = self.folder / f"libraries-{len(self._installed)}"
            words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(path)]
            words += libraries
            subprocess.run(words, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
            self._installed[libraries] = path
        return self._installed[libraries]

    def trace(
        self, script: str, arguments: str, processes: int, perturb: bool = False, libraries: tuple[str, ...] = ()
    ) -> Path:
        key = (script, arguments, processes, perturb, libraries)
        if key not in self._known:
            path = self.folder / f"{len(self._known):03d}"
            words = command(script, arguments, processes)
            prepare(path, words, settings := Settings(str(path), perturb=perturb))
            beside = self.installed(libraries) if libraries else None
            anew = self.anew or beside is not None
            with quiet(self.folder / "log.txt"):
                for name in NEEDED.get(script, ()) if not anew else ():
                    importlib.import_module(name)
                if anew:
                    status = launched(words, path, beside)
                else:
                    status = forked(script, arguments, processes, settings)
            if status == LATE:
                raise RuntimeError(f"{script} {arguments} did not end in {TIMEOUT} s")
            if status:
                log = (self.folder / "log.txt").read_text()[-1500:]
                raise RuntimeError(f"{script} {arguments} ended with status {status}: {log}")
            self._known[key] = path
        return self._known[key]


def forked(script: str, arguments: str, processes: int, settings: Settings) -> int:
    """Run ranks forked from this process, which has imported torch: saves seconds per rank. Returns the worst
    status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            if processes > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(processes)}
            sys.argv = [str(MUSEUM / script), *shlex.split(arguments)]
            tracer.begin(settings)
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            tracer.end()
            sys.stdout.flush()
            os._exit(status)
    return _waited(children, time.monotonic() + TIMEOUT)


def _waited(children: list[int], deadline: float) -> int:
    """Return the worst status. If one fails, or time is up, the others are terminated: they would wait for it."""
    worst = 0
    while children:
        child, ended = os.waitpid(children[0], os.WNOHANG) if len(children) == 1 else os.waitpid(-1, os.WNOHANG)
        if not child:
            if time.monotonic() > deadline:
                worst = LATE
                deadline = math.inf
                for other in children:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.05)
            continue
        children.remove(child)
        if (status := os.waitstatus_to_exitcode(ended)) and not worst:
            worst = status
            for other in children:
                os.kill(other, signal.SIGKILL)
    return worst


def launched(words: list[str], folder: Path, libraries: Path | None = None) -> int:
    """Run a command in its own process with a prepared folder. Returns its status."""
    environment = environment_of(folder)
    if libraries is not None:
        environment["PYTHONPATH"] += os.pathsep + str(libraries)
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return LATE


class quiet:
    """Redirects standard streams of child processes to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.saved = os.dup(1), os.dup(2)
        with self.path.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def look(runs: Runs, exhibit: Exhibit) -> Result:
    folder = runs.trace(exhibit.script, exhibit.arguments, exhibit.processes, libraries=exhibit.libraries)
    trace = read(folder)
    found = findings(trace)
    if exhibit.reference is None:
        if not found:
            return Result("", False)
        level = "" if found[0].level == "wrong" else f"{found[0].level}: "
        text = f"{level}[{found[0].code}] {found[0].what}: {found[0].cause}"
        return Result(text, found[0].code == exhibit.expected)
    reference, perturbed = (runs.trace(exhibit.script, exhibit.reference, 1, p) for p in (False, True))
    verdict = _first(read(reference), trace, read(perturbed))
    if verdict is None:
        return Result("", False)
    text = f"{verdict.first}, step {verdict.step}: {verdict.cause}"
    return Result(text, any(part in verdict.cause for part in exhibit.expected.split("|")))


def _first(reference: Trace, trace: Trace, perturbed: Trace) -> Comparison | None:
    """Verdict of the first optimizer with differing steps, as in `lockstep diff`; None if all agree."""
    verdicts = (compare_traces(reference, trace, perturbed, optimizer=number) for number in reference.optimizers)
    return next((verdict for verdict in verdicts if verdict.first is not None), None)


def look_at_healthy(runs: Runs, healthy: Healthy) -> Result:
    trace = read(runs.trace(healthy.script, healthy.arguments, healthy.processes, libraries=healthy.libraries))
    if accusations := proved(findings(trace)):
        return Result(f"[{accusations[0].code}] {accusations[0].what}", False)
    if healthy.reference is not None:
        reference, perturbed = (runs.trace(healthy.script, healthy.reference, 1, p) for p in (False, True))
        verdict = _first(read(reference), trace, read(perturbed))
        if verdict is not None:
            return Result(f"{verdict.first}, step {verdict.step}: {'; '.join(verdict.lines)}", False)
    return Result("", True)


HELD_OUT = """
On sets whose authors knew no rules, the score is lower:

| set | faulty scripts | named by default | more with `--verbose` | healthy scripts | accused |
|---|---|---|---|---|---|
| [first](../../benchmarks/results/2026-11-28-trace-set.md), \
[second](../../benchmarks/results/2026-11-28-trace-second-set.md), \
[third](../../benchmarks/results/2026-11-29-trace-third-set.md), \
[fourth](../../benchmarks/results/2026-11-29-trace-fourth-set.md), \
[fifth](../../benchmarks/results/2026-11-29-trace-fifth-set.md), \
[sixth](../../benchmarks/results/2026-11-29-trace-sixth-set.md), \
[seventh](../../benchmarks/results/2026-11-29-trace-seventh-set.md) | 237 | 91 | 32 | 240 | 0 |
| [eighth](../../benchmarks/results/2026-11-30-trace-eighth-set.md), \
[ninth](../../benchmarks/results/2026-11-30-trace-ninth-set.md), \
[tenth](../../benchmarks/results/2026-11-30-trace-tenth-set.md) | 90 | 39 | 13 | 90 | 0 |
| [eleventh](../../benchmarks/results/2026-11-30-trace-eleventh-set.md), half | 30 | 17 | 1 | 30 | 0 |
| [twelfth](../../benchmarks/results/2026-11-30-trace-twelfth-set.md), half | 30 | 17 | 0 | 30 | 0 |
| [thirteenth](../../benchmarks/results/2026-11-30-trace-thirteenth-set.md) | 30 | 11 | 4 | 43 | 0 |
| [fourteenth](../../benchmarks/results/2026-11-30-trace-fourteenth-set.md), public reports | 30 | 18 | 1 | 43 | 0 |
| [fifteenth](../../benchmarks/results/2026-12-01-trace-fifteenth-set.md), public reports | 30 | 12 | 1 | 43 | 0 |

"""


RUNS = (  # of the last measurement
    "At first 109 had the expected cause first; three expected texts were reworded, and their exhibits run again."
)

TELLING = (  # shown on the page
    "zero-before-step",
)


def page(rows: list[tuple[Exhibit, Result]], healthy: list[tuple[Healthy, Result]]) -> str:
    """docs/reference/museum.md: the scores and a few exhibits. `listing` has all of them."""
    found, right = sum(bool(r.said) for _, r in rows), sum(r.right for _, r in rows)
    clean = sum(r.right for _, r in healthy)
    quiet = sum(r.said.startswith(("suspicious:", "info:")) for _, r in rows)
    lines = [
        "# The museum of silent faults",
        "",
        "Each exhibit is a small script with one silent fault. `lockstep trace` runs it unchanged.",
        "If a fault shows only in comparison, `lockstep diff` compares the script with a correct run on one process.",
        "",
        f"- **Faults**: {found} of {len(rows)} are found, {right} with the expected cause first. {quiet} are rated "
        "suspicious,",
        "  and printed only with `--verbose`. "
        f"{sum(_how(e) in AS_RELEASED for e, _ in rows)} are public faults, reproduced in the reported library.",
        f"- **Healthy scripts**: {clean} of {len(healthy)} have no finding.",
        "",
        RUNS,
        *HELD_OUT.splitlines(),
        "One exhibit of [all](../../benchmarks/results/museum.md):",
        "",
        "| fault | symptom | cause named |",
        "|---|---|---|",
    ]
    shown = {exhibit.name: (exhibit, result) for exhibit, result in rows}
    for name in TELLING:
        if name in shown:
            exhibit, result = shown[name]
            lines.append(f"| {_name(exhibit)} | {exhibit.symptom} | {_cell(result.said) or '**nothing**'} |")
    lines += [
        "",
        "Run one:",
        "",
        "<!-- not run: minutes; tests/museum/test_museum.py runs the exhibits -->",
        "```sh",
        f"python benchmarks/silent_faults.py run --only {rows[0][0].name}",
        f"lockstep trace -o a -- torchrun --nproc-per-node 2 tests/museum/{OWN[0].script} {OWN[0].arguments}",
        "```",
        "",
        f"Measured {time.strftime('%Y-%m-%d')} on 2 cores of an AMD EPYC virtual machine without a GPU, "
        f"Python {platform.python_version()}.",
        "",
        "## Found in public scripts",
        "",
        "On generated data, shortened:",
        "",
        "| repository | script | processes | finding |",
        "|---|---|---|---|",
    ]
    lines += [f"| {where} | `{path}` | {n} | {what} |" for where, path, n, what in IN_PUBLIC_SCRIPTS]
    return "\n".join(lines) + "\n"


def listing(rows: list[tuple[Exhibit, Result]], healthy: list[tuple[Healthy, Result]]) -> str:
    """benchmarks/results/museum.md: every exhibit, every healthy script, and reports without an exhibit."""
    lines = [
        "# All exhibits of the museum",
        "",
        "Written by `python benchmarks/silent_faults.py page` from `tests/museum`; the scores are on",
        "[the museum's page](../../docs/reference/museum.md). Each finding is explained in",
        "[trace findings](../../docs/reference/trace-findings.md). The commands stand in",
        "[exhibits.py](../../tests/museum/exhibits.py).",
        "",
        "| origin | what it is |",
        "|---|---|",
        "| version | a released version that has the fault, installed beside the environment |",
        "| patch | the installed library, with the lines of a repair taken back "
        "([patches.py](../../tests/museum/patches.py)) |",
        "| library | the installed library as it is, used as in the report |",
        "| mechanism | the reported mechanism, in a script of ours |",
        "| planted | a fault of ours; a link shows a report of the same fault |",
        "",
        f"The expected cause of {len(FROM_REPORTS)} faults from reports was written down before the first run: "
        f"{FIRST_RUN}. That of the others was set with verdicts in view.",
        "",
        "## Faults",
        "",
        "| fault | origin | symptom | finding, or first difference |",
        "|---|---|---|---|",
    ]
    for exhibit, result in rows:
        said = _brief(result.said) + ("" if result.right else " (another cause was expected)")
        lines.append(f"| {_name(exhibit)} | {_how_in_words(exhibit)} | {exhibit.symptom} | {said} |")
    lines += ["", "## Reports without an exhibit", ""]
    lines += ["| report | why, and what stands for it |", "|---|---|"]
    lines += [f"| {_linked(where)} | {why} |" for where, why in NOT_SHOWN]
    lines += ["", "## Healthy scripts", "", "| script | processes | compared with | finding |", "|---|---|---|---|"]
    for each, result in healthy:
        side = f"`{each.reference}`" if each.reference else ""
        beside = f" ({each.libraries[0]})" if each.libraries else ""
        said = _cell(result.said) or "none"
        lines.append(f"| `{each.script} {each.arguments}`{beside} | {each.processes} | {side} | {said} |")
    return "\n".join(lines) + "\n"


def _name(exhibit: Exhibit) -> str:
    report = REPORTS.get(exhibit.name)
    return f"[{exhibit.name}]({report.link})" if report else exhibit.name


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _brief(said: str) -> str:
    """The code of a finding, with its level, or the first difference without advice."""
    finding = re.match(r"(?:(\w+): )?\[([a-z-]+)\]", said)
    if finding:
        return f"`{finding[2]}`" + (f" ({finding[1]})" if finding[1] else "")
    return _cell(": ".join(said.split(": ")[:2])) or "**nothing**"


AS_RELEASED = ("version", "patch", "library")


def _how(exhibit: Exhibit) -> str:
    return REPORTS[exhibit.name].how if exhibit.name in REPORTS else "planted"


def _linked(where: str) -> str:
    """A report with its address."""
    if where.startswith("arXiv "):
        return f"[{where}](https://arxiv.org/abs/{where.removeprefix('arXiv ')})"
    return f"[{where}]({Report(where).link})"


def _how_in_words(exhibit: Exhibit) -> str:
    how = _how(exhibit)
    if how == "version":
        return f"version: {exhibit.libraries[0]}"
    if how == "patch":
        patch = PATCHES[exhibit.name]
        return f"patch of {patch.lines} line{'s' if patch.lines > 1 else ''}: {patch.package} {_version(patch.package)}"
    if how == "library":
        return f"library: {REPORTS[exhibit.name].package} {_version(REPORTS[exhibit.name].package)}"
    return how


def _version(package: str) -> str:
    return version(package).partition("+")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--healthy", action="store_true", help="of `run`: the healthy scripts instead")
    parser.add_argument("--results", type=Path, help="a file of results: what it has is not run again, new ones follow")
    parser.add_argument("--anew", action="store_true", help="start each command in a process of its own, by torchrun")
    known = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[tuple[Exhibit, Result]] = []
    clean: list[tuple[Healthy, Result]] = []
    earlier = _earlier(known.results)

    def result_of(look_at, each, key: str) -> Result:  # type: ignore[no-untyped-def]
        result = earlier.get(key) or guarded(look_at, runs, each)
        if known.results is not None and key not in earlier:
            with known.results.open("a") as file:
                file.write(json.dumps({"key": key, "said": result.said, "right": result.right}) + "\n")
        return result

    with tempfile.TemporaryDirectory(prefix="lockstep-museum-") as folder:
        runs = Runs(Path(folder), known.anew)
        faults = [e for e in FAULTS if not known.only or e.name in known.only]
        healthy = [h for h in HEALTHY if not known.only or {h.script, h.arguments} & set(known.only)]
        for exhibit in faults if not known.healthy else ():
            result = result_of(look, exhibit, exhibit.name)
            rows.append((exhibit, result))
            print("right" if result.right else "WRONG", exhibit.name, "|", result.said or "nothing", flush=True)
        for each in healthy if known.healthy or known.what == "page" else ():
            result = result_of(look_at_healthy, each, f"{each.script} {each.arguments} on {each.processes}")
            clean.append((each, result))
            print("clean" if result.right else "FALSE", each.script, each.arguments, "|", result.said, flush=True)
    if known.what == "page":
        (ROOT / "docs/reference/museum.md").write_text(page(rows, clean))
        (ROOT / "benchmarks/results/museum.md").write_text(listing(rows, clean))
    return 0 if all(r.right for _, r in [*rows, *clean]) else 1


def _earlier(path: Path | None) -> dict[str, Result]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["key"]: Result(row["said"], row["right"]) for row in rows}


def guarded(look_at, runs: Runs, each) -> Result:  # type: ignore[no-untyped-def]
    try:
        return look_at(runs, each)
    except (RuntimeError, TraceError, subprocess.SubprocessError) as error:
        return Result(f"ERROR {error}", False)


if __name__ == "__main__":
    sys.exit(main())
