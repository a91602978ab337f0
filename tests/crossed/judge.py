"""Runs a job in each drawn way (strategies, stops, kills), and reports deviations from lockstep's promises.

In: a job, an empty folder. Out: a `Verdict`: refused with a reason, as promised, or a finding. The first promise that
is broken is told, with what was seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from crossed import plainly
from crossed.broken import Finding, Refused
from crossed.job import Job
from crossed.ranks import STOPPED, Watched, lines_of, run_ranks
from crossed.rows import HELD_OUT, TRAIN

LONG = 4000  # characters of what is shown of a fault
LOW_ROUNDING = 1e-2  # relative, of losses and norms where autocast rounds to 8 bits in other places
DRIFT = 0.05  # relative: losses of later steps if bits are not promised, because AdamW amplifies rounding


@dataclass
class Verdict:
    """The result of one job."""

    outcome: str  # promised | refused | finding
    promise: str = ""  # of a finding: which was broken
    seen: str = ""  # of a finding, or why it was refused
    bits: bool = False  # whether bits were promised and compared
    plain: str = ""  # how it was compared with the plain reference
    examples: int = 0  # evaluated, all evaluations together
    seconds: float = 0.0  # of processor time, all processes
    notes: list[str] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", [], 0, False)}


def judge(job: Job, folder: Path) -> Verdict:
    """Run a job in an empty folder."""
    verdict = Verdict("promised")
    began = _seconds()
    try:
        _judged(job, folder, verdict)
    except Refused as caught:
        verdict.outcome, verdict.seen = "refused", str(caught)
    except Finding as caught:
        verdict.outcome, verdict.promise, verdict.seen = "finding", caught.promise, caught.seen[-LONG:]
    except BaseException:
        verdict.outcome, verdict.promise = "finding", "the generator itself works"
        verdict.seen = traceback.format_exc()[-LONG:]
    verdict.seconds = round(_seconds() - began, 2)
    return verdict


def _seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _judged(job: Job, folder: Path, verdict: Verdict) -> None:
    job.write(folder)
    os.chdir(folder)
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    first, second = _words(job.first), _words(job.second)
    checked(["output=alone"], "alone")
    checked(["output=first", *first], "first way")
    checked(["output=second", *second], "second way")
    for name in ("alone", "first", "second"):  # which only say that they could be started
        shutil.rmtree(folder / name, ignore_errors=True)

    alone = run_ranks(folder, ["output=alone"], 1, keep=job.compared and plainly.AVAILABLE)
    _ended(alone, [0], "alone")
    _each_example_once(job, alone, "alone")
    _each_evaluated_once(job, alone, verdict, "alone")

    begun = run_ranks(folder, ["output=ways", *first], job.first["launch.processes"], job.stop, job.how)
    early = [0] if "patience" in job.run.get("evaluate", {}) else []  # it may end by itself before
    _ended(begun, [*early, STOPPED] if job.how == "stop" else [*early, None], "first way")
    try:
        checked(["output=ways", *second], "second way")
    except Refused as caught:
        raise Finding("an interrupted run resumes", str(caught)) from caught
    ended = run_ranks(folder, ["output=ways", *second], job.second["launch.processes"])
    _ended(ended, [0], "second way")
    _each_evaluated_once(job, ended, verdict, "second way")
    verdict.bits = all(_gives_bits(["output=ways", *words]) for words in (first, second))
    if verdict.bits:
        _same_bits(job, folder)
    else:
        _near(folder, max(_rounding(words) for words in (first, second)))

    verdict.plain = plainly.compared(folder) if job.compared else "dropout"


def _words(way: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in way.items()]


# -- refusals --------------------------------------------------------------------------------------------------------


def checked(overrides: list[str], which: str) -> None:
    """`lockstep train` up to where it would start ranks. Errors: `Refused` for status 2 with a message, `Finding` for
    anything else but success. Beside a GPU in a process of its own: ranks cannot be forked from one that asked CUDA."""
    if not torch.cuda.device_count():
        return _check(overrides, which)
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_caught, args=(sending, overrides, which))
    process.start()
    sending.close()
    caught = receiving.recv()
    process.join()
    if caught is not None:
        raise caught
    return None


def _send_caught(sending: Connection, overrides: list[str], which: str) -> None:
    try:
        _check(overrides, which)
    except (Finding, Refused) as caught:
        sending.send(caught)
    else:
        sending.send(None)


def _check(overrides: list[str], which: str) -> None:
    from lockstep import cli
    from lockstep.launchers import local

    started = local.Local.start, local.prestart
    local.Local.start, local.prestart = (lambda *_: 0), (lambda *_: None)  # type: ignore[method-assign,assignment]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(["train", "run.yaml", *overrides])
    except BaseException as caught:
        raise Finding("an unsupported run is refused with a message", f"{which}: {traceback.format_exc()}") from caught
    finally:
        local.Local.start, local.prestart = started  # type: ignore[method-assign]
    if status == 0:
        return
    said = [line for line in err.getvalue().splitlines() if line.startswith("lockstep: ")]
    text = err.getvalue()[err.getvalue().rfind("lockstep: ") :].strip()
    if status != 2 or "Traceback" in err.getvalue() or not said:
        raise Finding("an unsupported run is refused with a message", f"{which}: status {status}: {err.getvalue()}")
    head, *more = text.splitlines()
    each = all(
        re.search(r" \[LS\d+\]$", line) for line in (head, *more)
    )  # of several keys of the run file, a line each
    head = re.sub(r" \[LS\d+\]$", "", head)
    if more and not each and not (head.endswith(":") and all(line.startswith("  ") for line in more)):
        raise Finding("a refusal is one line", f"{which}: {text}")
    raise Refused(f"{which}: {text.removeprefix('lockstep: ')}")


def _gives_bits(overrides: list[str]) -> bool:
    from lockstep.config.run import load
    from lockstep.data.job import Job as Resolved

    return Resolved.of(load("run.yaml", overrides)).same_bits


# -- what ranks did --------------------------------------------------------------------------------------------------


def _ended(watched: Watched, statuses: list[int | None], which: str) -> None:
    if watched.refusal:
        raise Finding("an unsupported run is refused before processes start", f"{which}: {watched.refusal}")
    if "the export would not work as trained" in watched.fault:  # by transformers alone; known before a step
        raise Refused(f"{which}: {watched.fault.strip().splitlines()[-1]}")
    if watched.fault:
        raise Finding("an accepted run trains", f"{which}: {watched.fault}")
    if any(status not in statuses for status in watched.statuses):
        log = Path("alone" if which == "alone" else "ways", "log.txt")
        last = log.read_text().splitlines()[-1:] if log.exists() else []
        raise Finding("an accepted run trains", f"{which}: statuses {watched.statuses} and not {statuses}: {last}")


def _each_example_once(job: Job, watched: Watched, which: str) -> None:
    """Check, for a single source, that the steps of an epoch use each example once."""
    if "sources" in job.run.get("data", {}):
        return
    epoch = Counter[int]()
    known = _all_rows(job) and not {"deduplicate", "decontaminate"} & {*job.run.get("data", {})}
    for step in sorted(watched.steps):
        whole = sorted(epoch) == list(range(TRAIN if known else len(epoch)))
        if whole and epoch.keys() & {*watched.steps[step]}:
            epoch.clear()
        epoch.update(watched.steps[step])
        twice = [row for row, times in epoch.items() if times > 1]
        if twice or (len(watched.steps[step]) < job.run["batch_size"] and sorted(epoch) != list(range(len(epoch)))):
            raise Finding(
                "an epoch uses each example once", f"{which}: to step {step} it uses {sorted(epoch)}; {twice}"
            )
        if len(watched.steps[step]) < job.run["batch_size"]:
            epoch.clear()


def _all_rows(job: Job) -> bool:
    """Return whether each row of a split is known to become one example."""
    fewer = {"filter", "limit", "drop_missing", "validation_fraction", "test_fraction", "sources"}
    several = ("language_modeling", "masked_language_modeling")  # examples are blocks, or turns
    if job.rows.get("repeated") or job.code:
        return False
    return not fewer & {*job.run.get("data", {})} and job.run["task"]["name"] not in several


def _each_evaluated_once(job: Job, watched: Watched, verdict: Verdict, which: str) -> None:
    """Check that each evaluation scores each of its examples once, on one rank only, and that the last one covers the
    whole split."""
    for each in watched.evaluations:
        verdict.examples += len(each["scored"])
        if not each["agree"]:
            raise Finding("an evaluation scores each example once", f"{which}: ranks of a pipeline score other rows")
        if each["scored"] != each["asked"]:
            extra = Counter(each["scored"]) - Counter(each["asked"])
            left = Counter(each["asked"]) - Counter(each["scored"])
            raise Finding(
                "an evaluation scores each example once",
                f"{which}: {each['split']}: twice or not asked for {dict(extra)}, left out {dict(left)}",
            )
    limit = job.run.get("evaluate", {}).get("limit")
    known = HELD_OUT if _all_rows(job) else 0
    for split in {each["split"] for each in watched.evaluations} - {""}:
        asked = [row for each in watched.evaluations if each["split"] == split for row in each["asked"]]
        if limit and split == "validation":
            continue
        if sorted({*asked}) != list(range(known or len({*asked}))):
            raise Finding("an evaluation scores each example once", f"{which}: of {split} only {sorted({*asked})}")


# -- comparing -------------------------------------------------------------------------------------------------------


def _same_bits(job: Job, folder: Path) -> None:
    """Compare all lines of metrics, the scores, the last checkpoint and the export bit for bit."""
    from support.checkpoints import digest

    alone, ways = (lines_of(folder / name / "metrics.jsonl") for name in ("alone", "ways"))
    for one, other in zip(alone, ways, strict=False):
        if one != other:
            differ = {k: (one.get(k), other.get(k)) for k in one.keys() | other.keys() if one.get(k) != other.get(k)}
            raise Finding("the bits of one process", f"step {one.get('step')} {one.get('split')}: {differ}")
    if len(alone) != len(ways):
        raise Finding("each step is logged once", f"{len(alone)} lines alone, {len(ways)} after a resume")
    last = [sorted((folder / name / "checkpoints").glob("step-??????"))[-1] for name in ("alone", "ways")]
    if last[0].name != last[1].name or digest(last[0]) != digest(last[1]):
        raise Finding("the bits of one process", f"the last checkpoints {last[0].name} and {last[1].name} differ")
    exports = [_hashes(folder / name / "export") for name in ("alone", "ways")]
    if exports[0] != exports[1]:
        differ = sorted({*exports[0].items()} ^ {*exports[1].items()})
        raise Finding("the bits of one process", f"exports differ: {differ}")
    if _read(folder / "alone/scores.json") != _read(folder / "ways/scores.json"):
        raise Finding("the bits of one process", "scores.json differs")


def _hashes(folder: Path) -> dict[str, str]:
    files = folder.rglob("*.safetensors")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _rounding(words: list[str]) -> float:
    """Return the relative tolerance against one process, according to the strategy."""
    from lockstep.config.run import load
    from lockstep.data import job

    run = load("run.yaml", words)
    named = job.Job.of(run)
    return max(named.strategy.rounding(named), LOW_ROUNDING if run.precision != "fp32" else 1e-4)


def _near(folder: Path, rounding: float) -> None:
    """Check a run without exact bits: the first step within `rounding`, later ones within its growth, all numbers
    finite."""
    alone, ways = (
        [line for line in lines_of(folder / name / "metrics.jsonl") if line["split"] == "train"]
        for name in ("alone", "ways")
    )
    if [line["step"] for line in alone] != [line["step"] for line in ways]:
        raise Finding("each step is logged once", f"{[line['step'] for line in ways]}")
    for place, (one, other) in enumerate(zip(alone, ways, strict=True)):
        allowed = rounding if place == 0 else max(DRIFT, rounding)
        for key in ("loss", "grad_norm"):
            a, b = one[key], other[key]
            if key == "grad_norm" and place:
                continue
            if not (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= allowed * max(abs(a), 1e-3)):
                raise Finding("equal to rounding", f"step {one['step']}: {key} {b} and not {a}")
