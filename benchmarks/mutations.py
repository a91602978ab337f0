"""Faults planted in lockstep's own source, one at a time, against what is to find them: tests, `verify`, the dry run.

In: benchmarks/mutations.toml, a list of faults of one line. Out: JSON, a line for each fault and judge: whether it was
found, by what, and in how many seconds. A fault is planted in a copy of the tree in a temporary folder, never in the
tree itself. Judges run one after another in processes that are forked from one which has imported torch and not
lockstep.

  python benchmarks/mutations.py run >> RESULTS   every fault, every judge; --only NAME ..., --judges ...
  python benchmarks/mutations.py table RESULTS    how many each judge found, and which none did

Judges:
  tests   the files of tests that concern the faulty one, as `near` of the list says: of `make test` those that start no
          processes, then its kernel; then, of `.ci/run`, the others that start processes. The first that fails ends it.
  verify  `lockstep verify --no-plain` on `RUNS`, three steps on two processes: against one process of the same
          lockstep.
  plain   what `lockstep verify --plain` compares, of `BESIDE`: three steps against transformers and torch.
  train   `lockstep train` of the same, two steps: stopped by what is compared before the first step, or of the export.
  crossed tests/crossed/test_crossed.py: the runs of the generator that every CI job draws; once there are some.

Of the last four only those runs are asked that execute a line of the faulty statement where nothing is planted
(`Reach`): in all others the fault does nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
QUICK = "not slow and not long and not gpu and not cluster and not extras"
LIMIT_S = 1800  # a judge that takes longer has detected a hang
APART = ("repo/test_mutations.py",)  # it tests the list itself, so it would detect every fault

# name -> a run of tests/support/task_runs.py, or TINY of tests/support/harness.py, and what it crosses with the others'
# features.
RUNS: dict[str, tuple[str, list[str]]] = {
    "ddp": ("documents", ["strategy.name=ddp", "average.ema=0.9", "data.group_by_length=2"]),
    "fsdp2": ("tiny", ["strategy.name=fsdp2", "task.class_weights=balanced", "optim.layerwise_lr_decay=0.9"]),
    "pipeline": ("prompts", ["strategy.name=pipeline", "task.samples=0"]),
    "zero1": ("tiny", ["strategy.name=zero1"]),
    "zero2": ("tiny", ["strategy.name=zero2"]),
    "zero3": ("prompts", ["strategy.name=zero3", "precision=bf16", "task.samples=0"]),
}
# rooms whose faults are tried on each of `RUNS`; faults elsewhere on the first only
OF_RANKS = ("strategies", "distributed")
# The same for the plain reference under `single`: a fault is tried on `USUAL`, except faults of a task.
BESIDE: dict[str, list[str]] = {
    "tiny": ["task.class_weights=balanced", "task.label_smoothing=0.1"],
    "prompts": ["average.ema=0.9", "optim.groups=[{match: '*mlp*', learning_rate: 1e-3}]"],
    "packed": ["task.attend_across_documents=false", "task.loss_chunk=16"],
    "messages": [],
    "translation": ["task.label_smoothing=0.1"],
    "token_classification": [],
    "preference": ["task.loss=ipo"],
    "reward": ["task.center=0.1"],
    "masked": [],
    "questions": [],
    "pairs": ["data.padding=batch"],
}
USUAL = ("tiny", "prompts", "packed")


@dataclass(frozen=True)
class Fault:
    """An entry of `FAULTS`, which documents its fields."""

    name: str
    file: str
    old: str
    new: str
    does: str

    def planted(self, text: str) -> str:
        """Return the file's text with the fault. Errors: `ValueError` if its place is ambiguous."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} holds its text {text.count(self.old)} times, and not once")
        return text.replace(self.old, self.new)

    def lines(self, text: str) -> range:
        """Approximate first to last line of the changed statement, from 1."""
        at = text.index(self.old)
        return range(text.count("\n", 0, at) + 1, text.count("\n", 0, at + len(self.old)) + 2)


def listed() -> dict[str, Any]:
    """Load `FAULTS`."""
    return tomllib.loads(FAULTS.read_text(encoding="utf-8"))


def faults() -> list[Fault]:
    return [Fault(**each) for each in listed()["fault"]]


# -- a copy of the tree ------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the files tracked by git, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "src" / "lockstep"
        asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for beside in ("shared",):  # data for some tests
            if (ROOT.parent / beside).is_dir():
                with contextlib.suppress(FileExistsError):
                    (folder.parent / beside).symlink_to(ROOT.parent / beside)

    @contextlib.contextmanager
    def holding(self, fault: Fault | None) -> Iterator[None]:
        """Context in which the copy has the fault; None: an unchanged copy."""
        if fault is None:
            yield
            return
        path = self.source / fault.file
        before = path.read_text(encoding="utf-8")
        self._write(path, fault.planted(before))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python compares size and whole seconds of the source
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


Verdict = tuple[bool, str]  # whether the judge found something, and its evidence


def asked(judge: Callable[..., Verdict], copy: Copy, *given: Any) -> dict[str, Any]:
    """Run a judge in its own process, which ends with all its children."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    start = time.perf_counter()

    def work() -> None:
        os.setsid()
        ours.close()
        log = os.open(copy.folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(copy.folder)
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT / "src", ROOT / "benchmarks")]
        ours_first = [copy.folder / "src", copy.folder / "tests", *(copy.folder / "packages").glob("*/src")]
        sys.path[:0] = [str(place) for place in ours_first]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[: len(ours_first)])
        theirs.send(judge(copy, *given))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    found, by = True, f"nothing said within {LIMIT_S} s"
    if ours.poll(LIMIT_S):
        try:
            found, by = ours.recv()
        except EOFError:
            by = "the judge's process ended"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return {"found": found, "by": by, "seconds": round(time.perf_counter() - start, 1)}


# -- judges ----------------------------------------------------------------------------------------------------------


def by_tests(copy: Copy, files: list[str], marks: str, keyword: str = "") -> Verdict:
    """First failing test in these files."""
    import pytest

    class Watch:
        first = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not self.first:
                self.first = report.nodeid

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and not self.first:
                self.first = report.nodeid

    watch = Watch()
    words = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", marks, "-k", keyword]
    status = pytest.main([*words, *(f"tests/{name}" for name in files)], plugins=[watch])
    if status in (0, 5):  # all passed; no test selected
        return False, ""
    return True, watch.first or f"pytest's status {int(status)}"


def file_of(name: str) -> str:
    """`tests/ROOM/test_NAME.py`, without `tests/`."""
    (path,) = ROOT.glob(f"tests/*/test_{name}.py")
    return str(path.relative_to(ROOT / "tests"))


def quick_tests(copy: Copy, fault: Fault, parts: list[str]) -> dict[str, Any]:
    """Run the tests part by part; the first is usually enough."""
    near = [file_of(name.partition("::")[0]) for name in listed()["near"][fault.file]]
    keyword = " or ".join(name.partition("::")[2] for name in listed()["near"][fault.file] if "::" in name)
    total = 0.0
    for part, files, marks in (
        ("near", near, f"not processes and {QUICK}"),
        ("kernel", near, f"kernel and {QUICK}"),
        ("processes", near, f"processes and not kernel and {QUICK}"),
    ):
        if part not in parts:
            continue
        found = asked(by_tests, copy, files, marks, keyword)
        total += found["seconds"]
        if found["found"]:
            return found | {"seconds": round(total, 1), "part": part}
    return {"found": False, "by": "", "seconds": round(total, 1), "part": parts[-1]}


def by_verify(copy: Copy, names: tuple[str, ...]) -> Verdict:
    """First of these `RUNS` that `lockstep verify` rejects."""
    from lockstep.cli import main
    from support import forked, task_runs
    from support.harness import tiny

    multiprocessing.util.spawnv_passfds = forked._forked_server  # type: ignore[attr-defined]
    forked._imported_with.update(os.environ)
    subprocess._fork_exec = forked._forked_module  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            kind, overrides = RUNS[name]
            more = ["launch.processes=2", *overrides]
            try:
                run = (
                    tiny(*more, output=f"{folder}/out") if kind == "tiny" else task_runs.make(Path(folder), kind, *more)
                )
                path = Path(folder, f"{name}.yaml")
                path.write_text(run.dump())
                status = main(["verify", str(path), "--steps", "3", "--no-plain"])
            except Exception as caught:
                return True, f"{name}: {type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
            if status:
                return True, name
    return False, ""


PARTS = ("near", "kernel", "processes")
JUDGES = (
    "tests",
    "verify",
    "plain",
    "train",
    *(("crossed",) if (ROOT / "tests/crossed/test_crossed.py").exists() else ()),
)


def by_plain(copy: Copy, names: tuple[str, ...]) -> Verdict:
    """First of these `BESIDE` runs that differs from the plain reference."""
    from lockstep.proof.against_plain import train_beside_plain
    from support import task_runs
    from support.harness import tiny

    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            more, at = ["strategy.name=single", *BESIDE[name]], Path(folder, name)
            try:
                run = tiny(*more, output=str(at)) if name == "tiny" else task_runs.make(at, name, *more)
                verdict = train_beside_plain(run, steps=3)
            except Exception as caught:
                return True, f"{name}: {type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
            print(name, verdict.uncovered, verdict.differences, flush=True)
            if verdict.differences:
                return True, f"{name}: {verdict.differences[0][:200]}"
    return False, ""


def by_training(copy: Copy, names: tuple[str, ...]) -> Verdict:
    """First of these `BESIDE` runs that fails before its first step or at its end."""
    from lockstep.cli import main
    from support import task_runs
    from support.harness import tiny

    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            more, at = ["strategy.name=single", "steps=2", *BESIDE[name]], Path(folder, name)
            run = tiny(*more, output=str(at / "out")) if name == "tiny" else task_runs.make(at, name, *more)
            at.mkdir(exist_ok=True)
            (at / "run.yaml").write_text(run.dump())
            try:
                status = main(["train", str(at / "run.yaml")])
            except Exception as caught:
                return True, f"{name}: {type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
            if status:
                return True, f"{name}: status {status}"
    return False, ""


BY: dict[str, Callable[..., Verdict]] = {"plain": by_plain, "train": by_training, "verify": by_verify}


def concerned(judge: str, fault: Fault | None) -> tuple[str, ...]:
    """Runs of a judge on which a fault is tried, if they reach it."""
    if judge == "verify":
        return tuple(RUNS)
    return tuple(BESIDE) if fault is None else tuple(listed()["beside"].get(fault.file, USUAL))


PROBE = """import os

_seen = set()


def reached(name):
    if name not in _seen:
        _seen.add(name)
        with open(os.environ["MUTATIONS_REACHED"], "a") as log:
            log.write(name + "\\n")
"""


def probed(text: str, some: list[Fault]) -> str:
    """The text of a file in which a line before the statement of each fault tells that it is executed."""
    lines = text.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    probes: dict[int, list[str]] = {}  # line, from 0 -> names
    for fault in some:
        first, begins = fault.lines(text).start, [0]
        for node in statements:
            line = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
            whole = not lines[node.lineno - 1][: node.col_offset].strip()  # no other statement on the line
            if whole and line < first <= (node.end_lineno or 0) and not lines[line].lstrip().startswith("elif "):
                begins.append(line)
        probes.setdefault(max(begins), []).append(fault.name)
    for at in sorted(probes, reverse=True):
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at:at] = [f'{indent}__import__("mutations_probe").reached("{name}")\n' for name in probes[at]]
    return "".join(lines)


class Reach:
    """Which faults' statements a judge's run executes, in any process. Determined on first use, in an instrumented
    copy."""

    def __init__(self, folder: Path) -> None:
        self.copy = Copy(folder)
        (folder / "src" / "mutations_probe.py").write_text(PROBE, encoding="utf-8")
        for file in {fault.file for fault in faults()}:
            path = self.copy.source / file
            text = path.read_text(encoding="utf-8")
            path.write_text(probed(text, [fault for fault in faults() if fault.file == file]), encoding="utf-8")
        self._names: dict[tuple[str, str], set[str]] = {}

    def runs(self, judge: str, fault: Fault) -> tuple[str, ...]:
        """Runs that execute the faulty statement; for a fault outside of ranks, `verify` runs once."""
        reached = (name for name in concerned(judge, fault) if fault.name in self._of(judge, name))
        alone = judge == "verify" and fault.file.partition("/")[0] not in OF_RANKS
        return tuple(itertools.islice(reached, 1 if alone else None))

    def _of(self, judge: str, name: str) -> set[str]:
        if (judge, name) not in self._names:
            log = self.copy.folder.parent / f"reached-{judge}-{name}"
            before = os.environ["LOCKSTEP_CACHE"]
            os.environ["MUTATIONS_REACHED"] = str(log)
            # an empty cache, so that everything is computed
            os.environ["LOCKSTEP_CACHE"] = f"{self.copy.folder.parent}/cache-{judge}-{name}"
            verdict = asked(BY[judge], self.copy, (name,))
            os.environ["LOCKSTEP_CACHE"] = before
            if verdict["found"]:
                raise SystemExit(f"{judge} {name} of the tree as it is: {verdict['by']}")
            self._names[judge, name] = {*log.read_text(encoding="utf-8").split()} if log.exists() else set()
        return self._names[judge, name]


def judged(copy: Copy, fault: Fault | None, judge: str, parts: list[str], reach: Reach) -> dict[str, Any]:
    names: tuple[str, ...] = ()
    if judge in BY:
        names = concerned(judge, None) if fault is None else reach.runs(judge, fault)
        if not names:
            return {"found": False, "by": "it runs none of these lines", "seconds": 0.0}
    with copy.holding(fault):
        if judge == "tests":
            if fault is None:
                files = [str(p.relative_to(ROOT / "tests")) for p in sorted(ROOT.glob("tests/*/test_*.py"))]
                files = [file for file in files if file not in APART]
                return asked(by_tests, copy, files, f"(not processes or kernel) and {QUICK}")
            return quick_tests(copy, fault, parts)
        if judge == "crossed":
            return asked(by_tests, copy, ["crossed/test_crossed.py"], QUICK)
        return asked(BY[judge], copy, names) | {"runs": list(names)}


# -- commands --------------------------------------------------------------------------------------------------------


def preload() -> None:
    """Import everything that the judges need, except lockstep."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it at import
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # set in Python's images; the copy should be compiled once
    sys.dont_write_bytecode = False
    import accelerate
    import deepspeed
    import numpy
    import pyarrow
    import pytest
    import tokenizers
    import torch
    import torch.distributed.run
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.marian.modeling_marian

    assert all((accelerate, deepspeed, numpy, pyarrow, pytest, tokenizers, torch, transformers))
    assert "lockstep" not in sys.modules, "lockstep is the copy's"


def run(names: list[str], judges: list[str], parts: list[str], done: Iterable[Mapping[str, Any]]) -> None:
    """Print a line per fault and judge that is not in `done`."""
    over = {(each["name"], each["judge"]) for each in done}
    chosen = [fault for fault in faults() if not names or fault.name in names]
    if unknown := {*names} - {fault.name for fault in chosen} - {"none"}:
        raise SystemExit(f"no fault is called {', '.join(sorted(unknown))}")
    some: list[Fault | None] = [*chosen] if "none" not in names else [None, *(f for f in chosen if names != ["none"])]
    preload()
    with tempfile.TemporaryDirectory(prefix="lockstep-mutations-") as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        os.environ["LOCKSTEP_CACHE"] = f"{folder}/cache"
        copy = Copy(Path(folder, "tree"))
        reach = Reach(Path(folder, "probed"))
        for fault in some:
            for judge in judges:
                name = fault.name if fault else "none"
                if (name, judge) not in over:
                    if fault and fault.file.startswith(("data/", "tasks/")):  # its cache must not be used by others
                        os.environ["LOCKSTEP_CACHE"] = f"{folder}/cache-{fault.name}"
                    else:
                        os.environ["LOCKSTEP_CACHE"] = f"{folder}/cache"
                    found = judged(copy, fault, judge, parts, reach)
                    found = {"name": name, "judge": judge} | found
                    print(json.dumps(found), flush=True)


def read(path: str) -> list[dict[str, Any]]:
    lines = Path(path).read_text(encoding="utf-8").splitlines() if path else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def table(results: list[dict[str, Any]]) -> str:
    """Format as Markdown: by room, how many faults each judge detected, and which faults no judge detected."""
    rooms = {fault.name: fault.file.partition("/")[0] for fault in faults()}
    found = {(each["name"], each["judge"]): each["found"] for each in results if each["name"] in rooms}
    judges = [*dict.fromkeys(judge for _, judge in found)]
    rows = [f"| room | faults | {' | '.join(judges)} |", "|---" * (2 + len(judges)) + "|"]
    for room in [*dict.fromkeys(rooms.values()), "all"]:
        names = [name for name, of in rooms.items() if room in (of, "all")]
        cells = []
        for judge in judges:
            answers = [found[name, judge] for name in names if (name, judge) in found]
            cells.append(f"{sum(answers)}" + f" of {len(answers)}" * (len(answers) < len(names)) if answers else "")
        rows.append(f"| {room} | {len(names)} | {' | '.join(cells)} |")
    none = [name for name in rooms if not any(found.get((name, judge), False) for judge in judges)]
    return "\n".join([*rows, "", f"found by none: {', '.join(none) or 'no fault'}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("file")
    running = commands.add_parser("run")
    running.add_argument("--only", nargs="*", default=[], help="names of faults; none: the tree as it is")
    running.add_argument("--judges", nargs="*", default=[*JUDGES], choices=JUDGES)
    running.add_argument("--parts", nargs="*", default=[*PARTS], choices=PARTS, help="of the judge tests")
    running.add_argument("--done", default="", help="a file of results: what is in it is not run again")
    words = parser.parse_args()
    if words.command == "table":
        print(table(read(words.file)))
    else:
        run(words.only, words.judges, words.parts, read(words.done))


if __name__ == "__main__":
    main()
