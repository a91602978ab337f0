"""`lockstep status`: what a run is doing, wherever it was launched."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import exported
from lockstep.config.error_messages import read_yaml
from lockstep.config.run import Run, RunError, load, override_of
from lockstep.distributed import evicted_hosts, job_record
from lockstep.distributed.job_record import JobRecord, State
from lockstep.launchers import start
from lockstep.launchers.processes import output_lock
from lockstep.track.console import Console
from lockstep.track.report import history

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.launchers.launcher import Launcher


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    parser.add_argument("--verify", action="store_true", help="read every byte of the checkpoints and the export")
    trust(parser)
    parser.add_argument("--json", action="store_true", help="the same facts as one JSON object")


def main(known: argparse.Namespace) -> int:
    run, record = run_of(known.output, known.trust)
    state = state_of(run, record, known.trust)
    metrics = last_metrics(run.folder)
    sound, damaged = checkpoints(run, known.verify)
    total = (record.steps if record else None) or next((m.steps for m in sound.values()), None) or run.steps
    step = max([line["step"] for line in metrics.values()] + list(sound), default=0)
    finished = came_to_its_end(run, sound, total or 0) and (run.folder / "export" / "config.json").exists()
    if known.verify and finished and (fault := exported.damage(run.folder)) is not None:
        finished, damaged["export"] = False, fault
    if known.json:
        facts = {
            "output": str(run.folder),
            "launcher": record.launcher if record else None,
            "job": record.job if record else None,
            "state": state.word,
            "text": state.text,
            "status": state.status,
            "step": step,
            "steps": total,
            "finished": finished,
            "metrics": metrics,
            "checkpoints": sorted(sound),
            "damaged": damaged,
            "taken_out": [asdict(each) for each in evicted_hosts.of(run.folder)],
            "resumable_from": max(sound, default=None) if not finished else None,
        }
        print(json.dumps(facts, indent=1))
        return 0
    rows = {"run": f"{run.name} -> {run.folder}"}
    if record:
        rows["launched"] = origin(record)
    rows["state"] = state_sentence(state)
    rows["step"] = f"{step} of {total} ({100 * step // total} %)" if total else str(step)
    for split, line in metrics.items():
        rows[split] = f"step {line['step']}: " + ", ".join(
            f"{k} {v:.4g}" for k, v in line.items() if k not in ("step", "split") and isinstance(v, int | float)
        )
    rows["saved"] = ", ".join(f"step {s}" for s in sorted(sound)) or "no checkpoint yet"
    for name, reason in damaged.items():
        rows[name] = f"cannot be used: {reason}"
    if gone := evicted_hosts.of(run.folder):
        rows["taken out"] = "; ".join(map(str, gone))
    rows["resume"] = advice(run, state, finished, max(sound, default=None))
    Console(True).facts(rows)
    return 0


NOT_WRITTEN = (
    f"there is no readable {job_record.FILE}: nothing has been launched into this folder, or an older version did"
)


def trust(parser: argparse.ArgumentParser) -> None:
    """The option of the commands that look after a run: OUTPUT may be a stranger's."""
    parser.add_argument(
        "--trust", action="store_true", help="OUTPUT is yours: import the modules that its files name, if any"
    )


def launcher_of(record: JobRecord, trusted: bool) -> Launcher:
    """The launcher that launch.json names. Errors: `RunError` for a module's class, unless OUTPUT is trusted."""
    if "." in record.launcher and not trusted:
        raise RunError(
            f"{job_record.FILE} names the launcher {record.launcher}, a class of a module that would be imported; if "
            "OUTPUT is yours, ask with --trust"
        )
    return start.launcher_named(record.launcher)


def run_of(output: str, trusted: bool = False) -> tuple[Run, JobRecord | None]:
    """The run of an output folder and its last launch; nothing that the folder names is imported unless it is trusted.
    Errors: `RunError` where it is no output folder."""
    folder = Path(output)
    record, state = output_lock.now(folder, job_record.read(folder))
    if not (folder / "run.yaml").is_file():
        if state is not None:
            raise RunError(f"{output}: {state.text} prepares a run there; there is nothing to see yet")
        raise RunError(f"{output} is not the output folder of a run: it has no run.yaml")
    return load(folder / "run.yaml", [f"output={json.dumps(output)}"], imports=trusted), record


def state_of(run: Run, record: JobRecord | None, trusted: bool = False) -> State:
    """What the run is doing now. Errors: `RunError`, if nobody can be asked."""
    if record is None:
        return State("unknown", NOT_WRITTEN)
    state = launcher_of(record, trusted).state(run, record)
    _, seen = output_lock.now(run.folder, record)
    return seen if seen is not None and state.word in ("unknown", "gone") else state


def origin(record: JobRecord) -> str:
    """How, where and when."""
    how = record.launcher or "by hand"
    job = f", job {record.job}" if record.job else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    return f"{how}{job}, {record.processes} process(es), from {record.process.host}, {when}"


def state_sentence(state: State) -> str:
    """The state in a sentence."""
    words = {
        "done": "done (status 0)",
        "stopped": "stopped on request (status 75)",
        "failed": f"failed (status {state.status})" if state.status is not None else "failed",
    }
    return words.get(state.word, state.word) + (f": {state.text}" if state.text else "")


def last_metrics(folder: Path) -> dict[str, dict[str, Any]]:
    """The last line of metrics.jsonl of each split."""
    return {line["split"]: line for line in history.lines_of(folder / "metrics.jsonl", ("step", "split"))}


def checkpoints(run: Run, thorough: bool) -> tuple[dict[int, Manifest], dict[str, str]]:
    """Those that can be resumed from, by step, and what is wrong with the others, by name. Contents of files are
    compared with their hashes only if `thorough`."""
    from lockstep.checkpoint.manifest import broken, candidates, misfit

    sound: dict[int, Manifest] = {}
    damaged: dict[str, str] = {}
    for path, found in candidates(run):
        reason = found if isinstance(found, str) else (broken if thorough else misfit)(path, found)
        if reason is None and not isinstance(found, str):
            sound[found.step] = found
        else:
            damaged[path.name] = reason or "not readable"
    return sound, damaged


def came_to_its_end(run: Run, sound: dict[int, Manifest], total: int) -> bool:
    """Whether no step comes after the newest checkpoint."""
    from lockstep.checkpoint.manifest import ended

    return bool(sound) and (max(sound) >= total or ended(run, sound[max(sound)]))


def advice(run: Run, state: State, finished: bool, newest: int | None) -> str:
    """Whether it can go on, from where, and how."""
    if finished:
        return f"nothing is left to do; the model is in {run.folder / 'export'}"
    words = ["lockstep", "train", str(run.folder / "run.yaml")]
    if Path(str(read_yaml((run.folder / "run.yaml").read_text(encoding="utf-8")).get("output"))) != run.folder:
        words.append(
            override_of("output", str(run.folder))
        )  # as one says it here: the run was started in another folder
    again = shlex.join(words)
    if state.live:
        where = f"step {newest}" if newest else "the start"
        return (
            f"goes on from {where} when its turn comes" if state.word == "waiting" else f"from {where}, if killed now"
        )
    if state.word == "done" and (run.folder / "export" / "config.json").exists():
        where = f"step {newest}" if newest else "the start"
        return (
            f"the model is in {run.folder / 'export'}, its checkpoint is not here: `{again}` trains again from {where}"
        )
    if newest is None:
        return f"there is no checkpoint: `{again}` begins from the start"
    return f"`{again}` goes on from step {newest}"
