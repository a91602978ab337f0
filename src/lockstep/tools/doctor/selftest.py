"""`lockstep doctor --selftest`: does every strategy keep its promise on this machine's own processors and GPUs?

In: a number of processes, a device. Out: a few steps of a small job under every strategy in each precision, compared
with the same steps of one process as `lockstep verify` does; one page about them and the machine, which can be sent to
somebody: it holds no token, and not the name of the host.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import QUICK_START, Run, RunError, keep, load
from lockstep.distributed.gpus import gpus_of
from lockstep.tools.doctor import machine
from lockstep.tools.subprocess_job import Child
from lockstep.track.console import Console

STEPS = 3
LIMIT_S = 600.0  # of one job: a backend that hangs is found, too
PRECISIONS = ("fp32", "bf16")
COLUMNS = ["strategy", "precision", "processes", "found", "seconds"]
KEPT = ("same bits", "equal to rounding")  # the promise
NOT_RUN = ("refused", "not installed")
_TOLD = ("machine", "memory", "torch", "packages")  # sections of `machine.probe` that the page holds
_LINES = 30  # of what a job that failed has said


@dataclass
class Outcome:
    """What came of one strategy in one precision."""

    strategy: str
    precision: str
    processes: int
    found: str  # one of KEPT or NOT_RUN, "NOT as promised", "failed" or "took too long"
    why: list[str]  # lines, where there is something to say
    seconds: float

    @property
    def wrong(self) -> bool:
        return self.found not in KEPT + NOT_RUN

    def row(self) -> list[str]:
        return [self.strategy, self.precision, str(self.processes), self.found, f"{self.seconds:.0f}"]


def selftest(names: Sequence[str], processes: int | None, device: str, page: Path, as_json: bool) -> int:
    """The whole command; `names`: of strategies. Returns 0 when each that can run here keeps its promise, else 1.
    Errors: `RunError` when none can run, or the page cannot be written."""
    if not page.absolute().parent.is_dir():
        raise RunError(f"--page: there is no folder {page.absolute().parent}")
    console = Console(not as_json)
    count = processes or max(2, gpus_of(asked("single", "fp32", 1, device)))
    runs = [[asked(name, precision, count, device) for name in names] for precision in PRECISIONS]
    console.say(f"{STEPS} steps under each strategy, {count} process(es), beside the same steps of one process ...")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-selftest-") as folder:
        for outcome in outcomes_of(Path(folder), runs):
            console.say(f"  {outcome.strategy:14}{outcome.precision:6}{outcome.found}")
            outcomes.append(outcome)
    if all(outcome.found in NOT_RUN for outcome in outcomes):
        raise RunError(f"--selftest: no strategy could run here: {' '.join(outcomes[0].why)}")
    facts = {name: told for name, told in machine.probe(page.absolute().parent).items() if name in _TOLD}
    facts["machine"].pop("host", None)
    report = {"outcomes": [asdict(outcome) for outcome in outcomes], **facts}
    if as_json:
        print(json.dumps(report, indent=2))
    write(page, outcomes, facts)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    kept = sum(outcome.found in KEPT for outcome in outcomes)
    for outcome in outcomes:
        for line in outcome.why[-1:] if outcome.found in NOT_RUN else outcome.why:
            console.say(f"{outcome.strategy}, {outcome.precision}: {line}")
    console.say(f"{kept} as promised, {len(wrong)} not, {len(outcomes) - kept - len(wrong)} not run; {page}")
    return int(bool(wrong))


def asked(strategy: str, precision: str, processes: int, device: str) -> Run:
    """The small job: the quick start's model with dropout, on few texts. Errors: `RunError`."""
    count = 1 if strategy == "single" else processes
    overrides = [
        f"strategy.name={strategy}",
        f"precision={precision}",
        f"launch.processes={count}",
        f"launch.device={device}",
        "launch.threads=1",  # so that one process adds as those of several do
        f"micro_batches={max(4, 1 << (processes - 1).bit_length())}",
        "model.config.resid_pdrop=0.1",
        "data.limit=400",
    ]
    if strategy == "pipeline" and not processes % 2:
        overrides.append("strategy.options.stages=2")
    run = load(None, overrides, QUICK_START)
    gpus = gpus_of(run)
    shared = -(-count // gpus) if gpus else 1
    return run.model_copy(update={"launch": run.launch.model_copy(update={"processes_per_gpu": shared})})


def outcomes_of(folder: Path, runs: Sequence[Sequence[Run]]) -> Iterator[Outcome]:
    """One after the other; `runs`: of one precision each."""
    for alike in runs:
        alone = folder / alike[0].precision / "alone"
        reference = _job("alone", alike[0], alone)
        for run in alike:
            began = time.monotonic()
            found, why = _outcome(run, folder / run.precision / run.strategy.name, alone, reference)
            seconds = time.monotonic() - began
            yield Outcome(run.strategy.name, run.precision, int(run.launch.processes), found, why, seconds)


def _outcome(run: Run, folder: Path, alone: Path, reference: tuple[str, list[str]]) -> tuple[str, list[str]]:
    try:
        strategy: Any = plugins.find("strategies", run.strategy.name)
        lacking = plugins.lacking(strategy.needs)
    except Exception as caught:  # an engine that lacks what this package knows of it
        return "failed", [f"{type(caught).__name__}: {' '.join(str(caught).split())[:300]}"]
    if lacking:
        return "not installed", [f"pip install 'lockstep-train[{lacking[0]}]'"]
    if reference[0]:
        return reference
    found, why = _job("under", run, folder)
    return (found, why) if found else compared(folder, alone)


def _job(kind: str, run: Run, folder: Path) -> tuple[str, list[str]]:
    """Run a job in a process of its own. Returns what stopped it, and what it said; empty when it ended well."""
    folder.mkdir(parents=True)
    keep(run.model_copy(update={"output": str(folder)}))
    child = Child(f"{__name__}.{kind}", [str(folder / "run.yaml"), str(folder)], folder, "job")
    try:
        ended = child.wait(LIMIT_S)
    finally:  # also at Ctrl-C
        child.kill()
    if not ended:
        return "took too long", [f"no end in {LIMIT_S:g} s", *child.errors.splitlines()[-_LINES:]]
    if child.status == 0:
        return "", []
    lines = [child.reason()] if child.status == 2 else child.errors.splitlines()[-_LINES:] or [child.reason()]
    return "refused" if child.status == 2 else "failed", lines


def under(words: list[str]) -> int:
    """In the child: the job under its strategy."""
    from lockstep.tools.verify import recorded

    return recorded(load(Path(words[0]), []), Path(words[1]), STEPS)[0]


def alone(words: list[str]) -> int:
    """In the child: the same job as one process."""
    from lockstep.tools.verify import record_alone

    return record_alone(load(Path(words[0]), []), Path(words[1]), STEPS)


def compared(folder: Path, alone: Path) -> tuple[str, list[str]]:
    """What `verify` says of two recordings."""
    from lockstep.tools.verify import compare, findings, promise
    from lockstep.training.recording import read

    mine = read(folder)
    if wrong := findings(mine, read(alone), compare(folder, alone)):
        return "NOT as promised", [promise(mine), *wrong]
    return KEPT[0] if mine.bits else KEPT[1], []


def write(page: Path, outcomes: list[Outcome], facts: dict[str, Any]) -> None:
    """The page. Errors: `RunError` when it cannot be written."""
    from lockstep.tools.doctor.doctor import rows_of
    from lockstep.track.report.report import write_page

    def notes() -> Iterator[tuple[str, list[str]]]:
        for outcome in outcomes:
            if outcome.why:
                lines = [line.replace(str(Path.home()), "~") for line in outcome.why]
                yield f"{outcome.strategy}, {outcome.precision}: {outcome.found}", lines

    try:
        write_page(
            page,
            "selftest.html.jinja",
            title="Does every strategy keep its promise here?",
            columns=COLUMNS,
            rows=[outcome.row() for outcome in outcomes],
            wrong=sum(outcome.wrong for outcome in outcomes),
            notes=list(notes()),
            facts={name: rows_of(name, told) for name, told in facts.items()},
            steps=STEPS,
        )
    except OSError as error:
        raise RunError(f"--page: {page} cannot be written: {error.strerror}") from error
